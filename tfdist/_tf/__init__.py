"""What other wings need of TensorFlow and Keras beneath their public API.

Read in this order: `private` (each private name, why, and what watches it),
`storage` (what a bucket does unlike a disk), `arguments` (checks), `waiting`
(deadlines), `errors`.
"""
