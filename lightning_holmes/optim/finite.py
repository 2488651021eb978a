"""A check for infinities and NaN in reduced gradients, for ``Trainer(detect_anomaly=True)``."""

from collections.abc import Iterable

from torch import Tensor

from lightning_holmes.errors import AnomalyError

_SHOWN = 5


def check_finite(gradients: Iterable[tuple[str, Tensor]], place: str) -> None:
    """Refuse infinities and NaN in the summed gradients of named parameters.

    torch's anomaly mode checks for NaN after each operator; it does not detect an infinity, which becomes NaN in clipping or a
    later step, where its origin is no longer known.

    Raises:
        AnomalyError: with the names of the parameters.
    """
    values = ((name, g.coalesce().values() if g.is_sparse else g) for name, g in gradients)
    found = {name: gradient for name, gradient in values if not gradient.isfinite().all()}
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        kind = "NaN" if any(gradient.isnan().any() for gradient in found.values()) else "infinite"
        raise AnomalyError(
            f"detect_anomaly: {kind} in the summed gradients of {', '.join(list(found)[:_SHOWN])}{more} ({place}), though no "
            f"operator of the backward gave NaN: look for what overflows there, or for a hook that changes them"
        )
