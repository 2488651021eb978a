"""Costs of layers: which parts scale with samples."""

from lightning_holmes.plan.layer_cost import LayerCost, ModelCost

LAYER = LayerCost(forward=6, backward=12, parameter_bytes=40, activation_bytes=5, held_bytes=70, fixed_forward_s=0.5)
MODEL = ModelCost(
    microbatch_samples=2,
    before=LayerCost(forward=1, backward=2, parameter_bytes=30, activation_bytes=5),
    layers=(LAYER,) * 3,
    after=LayerCost(forward=9, backward=18, parameter_bytes=33),
    shared_bytes=30,
    tokens_per_sample=8,
)


def test_more_samples_scale_work_and_activations_but_neither_weights_nor_fixed_seconds() -> None:
    layer = MODEL.for_samples(5).layers[0]
    assert (layer.forward, layer.backward, layer.activation_bytes, layer.held_bytes) == (15, 30, 12.5, 175)
    assert (layer.parameter_bytes, layer.fixed_forward_s) == (40, 0.5)
    assert MODEL.for_samples(5).for_samples(2) == MODEL
