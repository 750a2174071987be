//! `muster`: arguments in, exit code out.

/// Answers and requests of any size come and go, on several threads: this allocator gives memory back and takes it again
/// without asking the kernel for fresh pages each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    muster::cli::main()
}
