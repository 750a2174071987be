//! `muster`: arguments in, exit code out.

fn main() -> std::process::ExitCode {
    muster::cli::main()
}
