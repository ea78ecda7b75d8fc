"""What other wings need of TensorFlow and Keras beneath their public API.

Read in this order: `private` (each private name, why, and what watches it),
`private_checkpoints`, `private_positions`, `private_workers`,
`private_renewal`, `private_keras`, `versions` (what older ones lack), `storage`
(what a bucket does unlike a disk), `mutex` (turns at a variable), `tracing` (of
functions), `arguments` (checks), `waiting` (deadlines), `errors`.
"""
