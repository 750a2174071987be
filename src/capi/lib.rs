//! The C library of Muster: `libmuster.so`, `include/muster.h` and, for C++, `include/muster.hpp`.
//!
//! The library is thin: it translates between C and `muster::agent` and `muster::transfer`, and has no rule of
//! coordination. A program in C must not need Python, and only an interpreter can load the extension module
//! `muster._native`. So this library is separate from that module. Begin at `muster_join` in `join.rs`, then read
//! `agent.rs`.
//!
//! | file | what it does |
//! | --- | --- |
//! | `status.rs` | the status codes, and the error of the last failed call |
//! | `boundary.rs` | the border between C and Rust: stops panics, and checks every argument |
//! | `handles.rs` | the table that maps handles to objects |
//! | `process.rs` | refuses calls in a forked process |
//! | `wait.rs` | the runtime, waits, and cancellation |
//! | `returned_values.rs` | answers whose memory the caller frees |
//! | `agent.rs`, `join.rs` | the calls of a task, and how it joins |
//! | `buffer.rs`, `transfer.rs`, `launch.rs` | memory, transfers of it, and their wait for peers |
//!
//! # Types and ownership
//!
//! - **Handles** (`muster_agent`, `muster_buffer`, `muster_prepared`, `muster_transfer`, `muster_cancellation`) are
//!   opaque. C sees a handle as a pointer, but it is a number, which the library looks up in a table. The library
//!   never dereferences it, and no number is used twice. So the use of a freed or foreign handle is refused with
//!   `MUSTER_STATUS_INVALID_HANDLE`, and so is freeing a handle twice. Freeing NULL does nothing.
//! - Objects keep what they use. A transfer keeps its buffers, so handles may be freed in any order. Freeing a handle
//!   does not cancel the transfer. Memory of the caller is in use until its release callback is called.
//! - **Values** (`muster_bytes`, `muster_members`, `muster_entries`) are plain structs that point to memory of the
//!   library. The caller frees a value with the function of its type, which also empties the struct. Freeing an empty
//!   value does nothing.
//! - **Arguments** are borrowed for the call. If they are needed longer, the library copies them.
//! - **Texts** are UTF-8 and end with NUL. **Bytes** are a pointer and a length; NULL is allowed with length 0.
//! - **Structs of options** begin with their size, which `…_init` sets, and only grow at their end. A program that
//!   was compiled with a newer header may pass a larger struct. It is accepted if the fields that the library does
//!   not know are zero.
//!
//! # Errors
//!
//! Every function that can fail returns a `muster_status`. `muster_error_message` returns the text of this thread's
//! last failed call, which also says what to do next. Outputs are written only if the status is `MUSTER_STATUS_OK`.
//! The output `is_over` is an exception: it is also written if a transfer has failed. A panic in the library becomes
//! `MUSTER_STATUS_INTERNAL`. A null or misaligned pointer, a text that is not UTF-8, or a number out of range is
//! refused with `MUSTER_STATUS_INVALID_ARGUMENT`, before anything is done.
//!
//! # Threads and waits
//!
//! - Every function may be called from any thread at any time. If one thread frees an agent while a call on it waits
//!   in another thread, that call returns `MUSTER_STATUS_INVALID_HANDLE`.
//! - Every wait for other tasks or for the service has a timeout in milliseconds, from 0 to a year. With 0 a call
//!   does not wait for other tasks. A call may return up to a second after its timeout, because it first waits for
//!   the service's own answer, which says more than a timeout. `muster_join` may take 5 s more, in which it asks
//!   which tasks are missing.
//! - Every wait accepts a `muster_cancellation`, except `muster_transfer_cancel` and the functions that free. When
//!   the cancellation is triggered, its waits return `MUSTER_STATUS_INTERRUPTED`, and so do waits with it that begin
//!   later.
//! - Threads of the library send heartbeats and move bytes. They block all signals except those of their own faults,
//!   such as SIGSEGV. So the program's signal handlers run on its own threads, and a broken connection raises no
//!   SIGPIPE.
//! - A release callback may run on any thread, including the library's. It must return soon, must not throw, and must
//!   not call any function of the library. Inside a callback, waits and the end of an agent are refused with
//!   `MUSTER_STATUS_IN_CALLBACK`.
//! - After a `fork`, the child has none of these threads. If the parent had used the library, every function that
//!   returns a `muster_status` returns `MUSTER_STATUS_FORKED` in the child. `exec` is not affected.
//!
//! # Versions
//!
//! `muster_abi_version` returns the version of the binary interface that the loaded library has. `MUSTER_ABI_VERSION`
//! is the version of the header. Within a version, functions are added and structs of options grow. Any other change
//! increments the version, and with it the number in the name of the library (`libmuster.so.1`).
#![warn(clippy::too_many_lines)]
#![allow(unsafe_code, reason = "the border to C: exported functions, and pointers that C programs pass")]

mod agent;
mod boundary;
mod buffer;
mod handles;
mod join;
mod launch;
mod process;
mod returned_values;
mod status;
mod transfer;
mod wait;
