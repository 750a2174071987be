//! Plans of transfers, held against naive ways to find out what they should be.

mod documents;
mod hostile;
mod jax;
mod properties;
mod shapes;
mod support;
