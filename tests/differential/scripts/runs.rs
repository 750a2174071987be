use crate::script::{Release, Script};
pub fn scripts(_release: Release) -> Vec<Script> { Vec::new() }
