"""`MonitoredTrainingSession`: steps that go on when a process dies.

Read in this order: `monitored_session` (hooks around steps), `recoverable`
(what is built again after a failure, and how); beside them `recovery` (what is
done about which error) and `lockstep` (all-reduce: one process leads).

What each failure costs (design decision D7):

A worker dies: the others go on at once. It costs its dispatch, whose steps are
  made up for. It is taken back when it is up again, and begins with another
  pass over its data; meanwhile tfdist's readers let the others read all. Where
  an input function has shards of its own, a warning tells what nobody reads.
A worker loses its connection to a ps: as if it had died, but at once.
A worker freezes: after 15 s it is treated as dead, and taken back when it wakes
  up. What it then still sends is refused.
A parameter server (ps) dies and comes back: everything is built again in this
  process and restored. It costs the steps since the last checkpoint. Where
  that fails, this process restarts itself (same pid, same command).
A ps stays away: the session waits `max_wait_secs`, says so every ten seconds,
  then raises a `TimeoutError` that names it.
A ps freezes: after 15 s this process restarts itself, waits as above and
  restores.
The chief dies: when it is started again it restores. The servers free what the
  dead one held after 60 s.
The chief freezes: when it wakes up it goes on; if the servers have given it up
  meanwhile (after 60 s at the earliest), it builds again and restores.
A task is missing at the start: `TimeoutError`, as for a ps that stays away.
A second chief starts: `RuntimeError` there, which names who holds the job.
SIGTERM to the chief: a checkpoint as soon as the steps under way are done (20 s
  at most), exit code 143, which schedulers take as a reason to start it again.
  Workers and ps that are told so too serve on until then. It costs nothing.
An error in user code: raised, once. The last checkpoint stays.
The newest checkpoint is damaged: the one before is restored, with a warning.

In an all-reduce job (a cluster without ps) every process trains, and none can
go on without the others:

A process dies, freezes or is cut off: the others know in ten seconds or so
  (TensorFlow's heartbeat), restart themselves and wait for it, `max_wait_secs`
  at most; each says who is missing, and the limit ends it with exit code 1.
  Then all go on from the last checkpoint. It costs the steps since that one,
  and the start; nothing in exactness: the weights, random numbers and batches
  are those of a job that nobody disturbed.
SIGTERM: as above on the process that leads (the chief, else worker 0). Another
  one goes on for 20 s at most, since the whole job may be told so.
An error in user code: raised where it happened; the others wait for that
  process to be started again.
Processes with different programs (variables, batches, number of devices): a
  `ValueError` in each, before the first step, that names the difference.

Steps that were lost are run again; on parameter servers with other examples.
`global_step` counts applied updates and never passes the step at which a hook
stops training. While a ps is waited for, so are workers that are missing.

What is recovered from: `tf.errors.AbortedError` and `UnavailableError`, as in
TF1, raised by a step or a hook, and any TensorFlow error while a parameter
server is found to be gone. Ten failures without a step in between are raised,
and so is what a hook raises for the third time at one step, with every server
alive: that is the user's own error. (TF1 went on for ever.)

In one process a restored session goes on with the weights, the random seeds
and the batch of one that was never interrupted, if the loop's iterator can be
saved; a warning says where it cannot.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
