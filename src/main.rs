//! muster
fn main() {}
