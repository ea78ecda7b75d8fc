"""`MonitoredTrainingSession`: steps that go on when a process dies.

Read in this order: `trainable` (what is trained), `monitored_session` (hooks
around steps), `recoverable` (what is built again after a failure, and how);
beside them `recovery` (what is done about which error) and `lockstep`
(all-reduce: one process leads).

What each failure costs, with the test that shows it. "The last checkpoint" is
the last complete one: see `tfdist.hooks.CheckpointSaverHook` for how often one
is begun (by default after 60 s or more), and written while steps go on.

A worker dies: the others go on at once. It costs its dispatch, whose steps are
  made up for. It is taken back when it is up again, and begins with another
  pass over its data; meanwhile tfdist's readers let the others read all. Where
  an input function has shards of its own, a warning tells what nobody reads.
  (test_worker_killed_comes_back, test_worker_stays_away)
Workers come or go on purpose (`tfdist.cluster.size`): it costs no step. Those
  that leave end their steps first; a death at that very moment costs what the
  chief's does. While a worker that is to stay is dead, nothing changes. The
  chief saves and restarts itself to let a dead one go, and for any change of
  synchronous steps (`backup_workers`). Data that depend on the number of
  workers are dealt anew, from another pass. (test_1_to_3_to_2_by_the_launcher)
Parameter servers come or go on purpose: the chief saves, restarts itself and
  restores. It costs no step. (test_other_parameter_servers)
A worker loses its connection to a ps: as if it had died, but at once.
  (test_workers_lose_their_connections_to_the_servers)
A worker freezes: after 15 s it is treated as dead, and taken back when it wakes
  up. What it then still sends is refused. (test_worker_frozen)
A parameter server (ps) dies and comes back: variables get new memory and are
  restored, functions go on. Where one is in no checkpoint, or that fails, all
  is built again in this process, or it restarts itself (same pid and command).
  It costs the steps since the last checkpoint.
  (test_ps_killed_comes_back, test_killed_at_random_moments,
  test_functions_that_fail_after_they_were_kept_are_made_anew)
A ps, or the chief, dies while a checkpoint is written: that one is not, and
  the one before is restored. What another failure finds under way is completed
  first, 60 s at most. (test_each_is_of_its_step[killed],
  test_it_is_waited_for_before_a_recovery, test_storage_that_never_answers)
A checkpoint cannot be written: raised after a later step, recovered from like
  any other error, and at the third time raised. A warning says so at once.
  (test_its_error_ends_training, test_what_can_never_be_written_is_raised)
A ps stays away, or a task is missing at the start: the session waits
  `max_wait_secs`, says so every ten seconds, then raises a `TimeoutError` that
  names it. (test_ps_stays_away)
A ps freezes: after 15 s this process restarts itself, waits as above and
  restores. (test_ps_frozen)
The chief dies: when it is started again it restores. The servers free what the
  dead one held after 60 s. (test_chief_killed_and_started_again)
The chief freezes: when it wakes up it goes on; if the servers have given it up
  meanwhile (after 60 s at the earliest), it builds again and restores.
  (test_chief_frozen)
A second chief starts: `RuntimeError` there, which names who holds the job.
  (test_second_chief_is_refused)
Another job saves in the same directory: `RuntimeError` in the first to find the
  other's checkpoint as it saves. (test_another_job_saves_in_the_same_directory)
SIGTERM to the chief: a checkpoint once the steps under way are done (20 s at
  most) and the one being written is complete, then exit code 143, on which
  schedulers start it again. Workers and ps that are told so too serve on until
  then. It costs nothing. (test_sigterm_to_the_chief_loses_nothing,
  test_it_is_waited_for_after_sigterm)
An error in user code: raised, once. The last checkpoint stays.
  (test_error_of_the_user_is_raised_once)
The newest checkpoint is damaged: the one before is restored, with a warning.
  (test_a_damaged_checkpoint_is_passed_over)

In an all-reduce job (a cluster without ps) every process trains, and none can
go on without the others:

A process dies, freezes or is cut off: the others know in ten seconds or so
  (TensorFlow's heartbeat), restart themselves and wait for it, `max_wait_secs`
  at most; each says who is missing, and the limit ends it with exit code 1.
  Then all go on from the last checkpoint. It costs the steps since that one,
  and the start. (test_ends_as_if_undisturbed)
  A worker that stays away is done without after `last_call_timeout`, if the
  size may change and `min_workers` are left. (test_one_that_is_gone_for_good)
Workers come or go on purpose (`tfdist.cluster.size`): all save and restart
  themselves, which costs no step, but that time. The global batch stays; a
  size that would change it is refused. (test_2_to_3_to_2_processes,
  test_what_would_change_the_global_batch)
SIGTERM: as above on the process that leads (the chief, else worker 0). Another
  ends with exit code 143 once all have saved; the others restart themselves. As
  with TensorFlow's `PreemptionCheckpointHandler`, it costs no step. Where
  nothing saves it goes on for 20 s. (test_one_that_is_told_to_end)
An error in user code: raised where it happened. If that is the process that
  leads, all end with it; else the others wait for that one to come back.
Processes with different programs (variables, batches, number of devices): a
  `ValueError` in each, before the first step, that names the difference.
  (test_another_program_is_named)

How long steps stand still: until a process is in the place of the dead one (at
once where `tfdist launch` forks it: test_a_job_of_forks_goes_on), and while the
chief connects, restores and, if it is new, builds its model and traces its
step, and workers compile it. `benchmarks/recovery.py` measures each part.

Steps that were lost are run again; on parameter servers with other examples.
`global_step` counts applied updates and never passes the step at which a hook
stops training. While a ps is waited for, so are workers that are missing.

What is recovered from: `tf.errors.AbortedError` and `UnavailableError`, as in
TF1, raised by a step or a hook, and any TensorFlow error while a parameter
server is found to be gone. Ten failures without a step in between are raised,
and so is what a hook raises for the third time at one step, with every server
alive: that is the user's own error.

In one process a restored session goes on with the weights, random seeds and
batch of one that was never interrupted, if the loop's iterator can be saved.
Warnings tell where it cannot; where the input is another one by then (other
files, constants or functions, or files that begin otherwise) and is read from
its start; and where a dataset shuffles by a seed before it batches and repeats:
a position at the end of a pass has no order, so the same ones come again.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
