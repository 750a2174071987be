//! Physical allocations and their mappings.

use std::os::fd::{AsRawFd, OwnedFd};

use cudarc::driver::sys;

use super::Answers;
use crate::driver::{contents, copy, fill, new_stream, synchronize, write_device_bytes};
use crate::sharing::{
    create_physical, export, make_accessible, map, map_anywhere, memory_handle_answer, properties, reserve,
    try_import,
};

pub fn mappings(answers: &mut Answers) {
    answers.section("mappings");
    let mut len = 0;
    let prop = properties();
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the library reads properties and writes numbers.
    let answer = unsafe { sys::cuMemGetAllocationGranularity(&raw mut len, &raw const prop, option) };
    answers.note("cuMemGetAllocationGranularity", (answer, len));
    let (mut number, step) = (0, len as u64);
    // SAFETY: the library reads properties and writes handles and addresses.
    unsafe {
        answers.note(
            "cuMemCreate of half of it",
            sys::cuMemCreate(&raw mut number, len / 2, &raw const prop, 0),
        );
        let mut reserve = |len, alignment| sys::cuMemAddressReserve(&raw mut number, len, alignment, 0, 0);
        answers.note("cuMemAddressReserve of half of it", reserve(len / 2, 0));
        answers.note("cuMemAddressReserve at a third of it", reserve(len, len / 3));
    }
    let (handle, at, stream) = (create_physical(len), reserve(4 * len), new_stream());
    answers.note("the addresses are granular", at % step == 0);
    answers.note("cuMemMap of half of it", map(at, len / 2, handle));
    answers.note("cuMemMap of more than the allocation", map(at, 2 * len, handle));
    answers.note("cuMemSetAccess before cuMemMap", make_accessible(at, len));
    answers.note("cuMemMap", map(at, len, handle));
    answers.note("cuMemMap of the same addresses", map(at, len, handle));
    answers.note("cuMemsetD8Async before cuMemSetAccess", fill(at, 1, 4, stream));
    answers.note("cuMemSetAccess", make_accessible(at, len));
    answers.note("cuMemMap beside it", map(at + step, len, create_physical(len)));
    answers.note("cuMemSetAccess of both", make_accessible(at, 2 * len));
    write_device_bytes(at + step - 2, &[1, 2, 3, 4]);
    answers.note("contents across both", contents(at + step - 2, 4));
    let again = map_anywhere(handle, len);
    answers.note("contents of a second mapping", contents(again + step - 2, 2));
    answers.note("cuMemcpyAsync between mappings", copy(again, at + step, 4096, stream));
    answers.note("cuStreamSynchronize", synchronize(stream));
    answers.note("cuIpcGetMemHandle of a mapping", memory_handle_answer(at));
    let descriptor = export(handle);
    let imported = try_import(descriptor.as_raw_fd());
    answers.note("cuMemImportFromShareableHandle of one's own", imported.map(drop));
    if let Ok(imported) = imported {
        let there = map_anywhere(imported, len);
        answers.note("contents of the import", contents(there + step - 2, 2));
    }
    let file = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
    answers.note("cuMemImportFromShareableHandle of a file", try_import(file.as_raw_fd()).map(drop));
    // SAFETY: handles and addresses exist; each is given back once.
    unsafe {
        answers.note("cuMemRelease while it is mapped", sys::cuMemRelease(handle));
        answers.note("contents after the release", contents(at + step - 2, 2));
        answers.note("cuMemUnmap of half of a mapping", sys::cuMemUnmap(at, len / 2));
        answers.note("cuMemAddressFree while it is mapped", sys::cuMemAddressFree(at, 4 * len));
        answers.note("cuMemUnmap of both", sys::cuMemUnmap(at, 2 * len));
        answers.note("cuMemAddressFree", sys::cuMemAddressFree(at, 4 * len));
        answers.note("cuMemAddressFree of a part", sys::cuMemAddressFree(reserve(2 * len), len));
    }
}
