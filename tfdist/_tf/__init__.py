"""Everything that tfdist needs below the public API of TensorFlow and Keras.

Read in this order: `private` (each private name, why, and what watches it),
`private_checkpoints`, `private_positions`, `private_workers`,
`private_renewal`, `private_keras`, `versions` (what older ones lack), `storage`
(how a bucket differs from a disk), `mutex` (exclusive updates), `tracing` (of
functions), `arguments` (checks), `waiting` (deadlines), `errors`.
"""
