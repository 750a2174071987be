//! Sets a linker option of the extension: it is never unloaded. As NCCL's profiler plug-in it has a thread that runs code of it
//! until the process ends, while NCCL closes the library with its last communicator.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
