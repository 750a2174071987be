//! Sets the linker options of the plug-in: it is never unloaded, because its reporting thread runs code of it until the process
//! ends, while NCCL closes the library with its last communicator.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in ["-Wl,-soname,libmuster_nccl_profiler.so", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
