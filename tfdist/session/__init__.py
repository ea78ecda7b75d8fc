"""`MonitoredTrainingSession`: training that continues when a process dies.

Read in this order: `trainable` (what is trained), `monitored_session` (hooks
around steps), `recoverable` (rebuilding after a failure), `recovery` (which
errors are recovered from, and how) and `lockstep` (all-reduce: one process
leads).

The cost of each failure, with the test that shows it. "The last checkpoint" is
the last complete one: see `tfdist.hooks.CheckpointSaverHook` for how often one
is started (by default every 60 s or more); steps continue while it is written.

A worker dies: the others continue at once. It costs the worker's dispatch,
  whose steps are made up for. A restarted worker rejoins and starts another
  pass over its data; meanwhile tfdist's readers let the others read all of it.
  If an input function shards the data itself, a warning names the unread part.
  (test_worker_killed_comes_back, test_worker_stays_away)
Workers join or leave on purpose (`tfdist.cluster.size`): it costs no step.
  Leaving workers finish their steps first; a death at that moment costs as much
  as the chief's. The size does not change while a remaining worker is dead. The
  chief saves and restarts itself to remove a dead worker, and for any change
  with synchronous steps (`backup_workers`). Data that depend on the number of
  workers are redistributed in a new pass. (test_1_to_3_to_2_by_the_launcher)
Parameter servers join or leave on purpose: the chief saves, restarts itself and
  restores. It costs no step. (test_other_parameter_servers)
A worker loses its connection to a ps: as if it had died, but detected at once.
  (test_workers_lose_their_connections_to_the_servers)
A worker freezes: after 15 s it is treated as dead; it rejoins when it wakes up.
  Its late updates are rejected. (test_worker_frozen)
A parameter server (ps) dies and comes back: variables are reallocated and
  restored, and traced functions kept. If a variable is in no checkpoint, or
  this fails, the chief rebuilds everything, or restarts itself (same pid and
  command). It costs the steps since the last checkpoint.
  (test_ps_killed_comes_back, test_killed_at_random_moments,
  test_functions_that_fail_after_they_were_kept_are_made_anew)
A ps, or the chief, dies while a checkpoint is written: that checkpoint is lost,
  and the previous one is restored. After other failures, a checkpoint being
  written is completed first (60 s at most). (test_each_is_of_its_step[killed],
  test_it_is_waited_for_before_a_recovery, test_storage_that_never_answers)
A checkpoint cannot be written: a warning says so at once. The error is raised
  after a later step: that of a full disk ends training, whereas unavailable
  storage is recovered from, and ends it the third time.
  (test_its_error_ends_training, test_what_can_never_be_written_is_raised)
A ps stays away, or a task is missing at the start: the session waits
  `max_wait_secs`, logs every ten seconds, then raises a `TimeoutError` that
  names the task. (test_ps_stays_away)
A ps freezes: after 15 s the chief restarts itself, waits as above and restores.
  (test_ps_frozen)
The chief dies: when restarted, it restores. After 60 s the servers free the
  resources of the dead process. (test_chief_killed_and_started_again)
The chief freezes: when it wakes up it continues; if the servers have freed its
  state meanwhile (after 60 s at the earliest), it rebuilds and restores.
  (test_chief_frozen)
A second chief starts: it raises a `RuntimeError` that names the first one.
  (test_second_chief_is_refused)
Another job saves in the same directory: a `RuntimeError` in the first job to
  find the other's checkpoint. (test_another_job_saves_in_the_same_directory)
SIGTERM to the chief: a checkpoint once the running steps (20 s at most) and any
  checkpoint being written are complete, then exit code 143, on which schedulers
  restart it. Workers and ps that receive SIGTERM as well keep serving until
  then. It costs nothing. (test_sigterm_to_the_chief_loses_nothing,
  test_it_is_waited_for_after_sigterm)
An error in user code: raised, once. The last checkpoint is kept.
  (test_error_of_the_user_is_raised_once)
The newest checkpoint is damaged: the previous one is restored, with a warning.
  (test_a_damaged_checkpoint_is_passed_over)

In an all-reduce job (a cluster without ps) every process trains, and none can
continue without the others:

A process dies, freezes or is cut off: the others notice in about ten seconds
  (TensorFlow's heartbeat), restart themselves and wait for it, at most
  `max_wait_secs`; each logs which task is missing, and exits with code 1 after
  that time. Then all resume from the last checkpoint. It costs the steps since
  then, and the startup time. (test_ends_as_if_undisturbed)
  The job continues without a lost worker after `last_call_timeout`, if the
  size may change and `min_workers` remain. (test_one_that_is_gone_for_good)
Workers join or leave on purpose (`tfdist.cluster.size`): all save and restart
  themselves, which costs time but no step. The global batch size is kept; a
  cluster size that would change it is refused. (test_2_to_3_to_2_processes,
  test_what_would_change_the_global_batch)
SIGTERM: as above on the leader (the chief, else worker 0). Any other process
  exits with code 143 once all have saved; the others restart themselves. As
  with TensorFlow's `PreemptionCheckpointHandler`, it costs no step. If nothing
  saves, the process continues for 20 s. (test_one_that_is_told_to_end)
An error in user code, or `sys.exit`: raised where it happened. On the leader,
  or while the model and the input are made, it ends all processes, which say
  why (test_an_error_in_one_ends_all, test_a_leader_that_exits_ends_all);
  otherwise the leader says why, and the others wait for the failed process to
  come back (test_one_that_fails_later_is_waited_for), as they do after an error
  in a hook's `begin`, which runs before the processes meet.
Processes with different programs (variables, batches, number of devices): a
  `ValueError` in each, before the first step, that names the difference.
  (test_another_program_is_named)
Global batches that end in one process before they end in the others: a
  `RuntimeError` after 30 s. (test_data_that_end_in_one_end_all)

Steps pause until a process replaces the dead one (immediate if `tfdist launch`
forks it: test_a_job_of_forks_goes_on), and while the chief connects, restores
and, if it is new, builds its model and traces its step, and workers compile the
step. `benchmarks/recovery.py` measures each part.

Lost steps are run again; on parameter servers with different examples.
`global_step` counts applied updates and never passes the last step of a
`StopAtStepHook`. On parameter servers, the steps that workers have been given
are still run after another hook's `request_stop`. A session that waits for a ps
also waits for missing workers.

As in TF1, sessions recover from `tf.errors.AbortedError` and `UnavailableError`
raised by a step or a hook, and also from any TensorFlow error while a parameter
server is down. After ten failures without a successful step, the next one is
raised. So is an error that a hook raises for the third time at one step while
every server is alive: that is an error in user code.

In one process a restored session continues with the same weights, random seeds
and batch as an uninterrupted one, if the loop's iterator can be saved. Warnings
tell if it cannot; if the input has changed (other files, constants or
functions, or files that begin differently) and is read from its start; and if a
dataset shuffles by a seed before it batches and repeats: a position at the end
of a pass stores no order, so the same order is repeated.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
