"""Schedule: the list of actions of every pipeline rank for one batch. Plain data.

orders.py has the order of a rank's computations, specs.py is the registry of schedules, and schedule.py adds
transfers. The runner and the simulator execute exactly these actions; evaluation uses the
same lists without backward.

    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)
    [str(action) for action in schedule.actions[1]][:4]     # ["RA1.0", "F1.0", "RA1.1", "B1.0"]

The actions, for a stage s and a microbatch m:

    RA s.m   RECV_ACTIVATION    post a receive for the input of s; F s.m waits for it
    F  s.m   FORWARD            compute
    SA s.m   SEND_ACTIVATION    start to send the output of s to stage s+1, without waiting
    RG s.m   RECV_GRADIENT      post a receive for the gradient of the output of s; B s.m or I s.m waits for it
    B  s.m   BACKWARD           compute
    I  s.m   BACKWARD_INPUT     compute the gradient of the input of s only
    W  s.m   BACKWARD_WEIGHT    compute the rest of the backward: the gradients of the parameters
    SG s.m   SEND_GRADIENT      start to send the gradient of the input of s to stage s-1
    FT s     FETCH              start to gather the parameters of s; its first computation waits for them
    RL s     RELEASE            free the parameters: no computation of s follows before the next FETCH
    R  s     REDUCE_GRADIENTS   all microbatches of s are done: start to reduce its gradients to the ranks or nodes that own them

The last three belong to a whole stage; their microbatch is WHOLE_BATCH (-1). A stage is held from its first computation
to its last one (breadth_first may release it in between), and fetched one stage ahead: before the first computation of the
stage that its rank begins before it.

specs.py defines the rank of stage s; nothing is sent between stages of one rank. Three properties hold for every schedule:

- No deadlock, provided that posting and sending do not block.
- For each ordered pair of ranks (source, destination) the receives are posted in the order of the sends,
  activations and gradients together: NCCL matches by order, not by tag. A posted NCCL receive blocks all later
  operations on its communicator, so each ordered pair needs its own communicator; one for both directions would deadlock.
- A receive is posted at least one computation before the one that needs it, in eager schedules two, so that the transfer
  overlaps these computations (except for the first computations of a rank): gloo and NCCL transfer nothing before both ends
  have started. It is posted no earlier than this and the order require, since its buffer takes memory from then on.

tests/plan/schedule_checks.py checks the first two.
"""

from lightning_holmes.plan.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, mark_action
from lightning_holmes.plan.schedule.schedule import Schedule, make_schedule, max_in_flight
from lightning_holmes.plan.schedule.specs import SCHEDULE_NAMES, SCHEDULES, ScheduleName, spec_of

__all__ = [
    "COMPUTE_OPS",
    "RECV_OPS",
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "SEND_OPS",
    "Action",
    "Op",
    "Schedule",
    "ScheduleName",
    "make_schedule",
    "mark_action",
    "max_in_flight",
    "spec_of",
]
