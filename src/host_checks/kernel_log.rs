//! Reads what the NVIDIA driver has written to the kernel's log: an Xid is the number of an error of a GPU.
//!
//! Begin at [`read_xids`].

use std::io::ErrorKind;

use super::host_root::HostRoot;

/// An error of a GPU that the kernel's log tells of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Xid {
    /// The address of the GPU, such as `0000:3b:00`.
    pub(super) pci: String,
    pub(super) number: u32,
}

/// The meaning of an Xid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct XidMeaning {
    pub(super) text: &'static str,
    pub(super) blame: XidBlame,
}

/// The cause of an Xid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XidBlame {
    /// A program: the GPU goes on.
    Program,
    /// The GPU or its links: it needs a reset, or repair.
    Device,
    /// One that has to be looked up.
    Unknown,
}

/// The meanings, in our words, of the numbers in NVIDIA's catalogue of Xid errors.
pub(super) fn meaning_of(number: u32) -> XidMeaning {
    let (blame, text) = match number {
        13 => (XidBlame::Program, "a kernel failed"),
        31 => (XidBlame::Program, "a program used an address that it does not have"),
        43 => (XidBlame::Program, "a program's work was stopped"),
        45 => (XidBlame::Program, "a program's work was cleaned up"),
        68 => (XidBlame::Program, "a video decoder failed"),
        109 => (XidBlame::Program, "a program's work did not give way"),
        48 => (XidBlame::Device, "memory has an error that cannot be corrected"),
        63 => (XidBlame::Device, "a row of memory is to be replaced"),
        64 => (XidBlame::Device, "a row of memory could not be replaced"),
        74 => (XidBlame::Device, "an NVLink failed"),
        79 => (XidBlame::Device, "the GPU has fallen off the bus"),
        92 => (XidBlame::Device, "memory needs many corrections"),
        94 => (XidBlame::Device, "memory has an error, and one program was ended for it"),
        95 => (XidBlame::Device, "memory has an error that may concern all programs"),
        119 | 120 => (XidBlame::Device, "the GPU's own processor does not answer"),
        140 => (XidBlame::Device, "memory has an error that was not recovered"),
        _ => (XidBlame::Unknown, "see NVIDIA's catalogue of Xid errors"),
    };
    XidMeaning { text, blame }
}

/// Returns the Xids in the kernel's log, the oldest first.
///
/// # Errors
/// Returns why the log cannot be read. The kernel may keep it from all but root.
pub(super) fn read_xids(root: &HostRoot) -> Result<Vec<Xid>, ErrorKind> {
    let text = root.read_kernel_log().map_err(|error| error.kind())?;
    Ok(text.lines().filter_map(parse_line).collect())
}

/// Parses a line such as `3,1027,5126,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus.`
fn parse_line(line: &str) -> Option<Xid> {
    // Programs may write lines to the log: theirs have another facility than the kernel, which is the priority above 7.
    let (prefix, message) = line.split_once(';')?;
    let priority: u32 = prefix.split(',').next()?.parse().ok()?;
    let told = message.strip_prefix("NVRM: Xid (").filter(|_| priority < 8)?;
    let (device, rest) = told.split_once("): ")?;
    // A part of a GPU (MIG) is named behind its address.
    let pci = device.strip_prefix("PCI:").unwrap_or(device).split(' ').next()?;
    let is_address =
        pci.len() <= 16 && pci.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
    is_address.then_some(Xid { pci: pci.to_owned(), number: digits.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn only_lines_of_the_driver_are_xids() {
        let log = "6,1,10,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n\
            3,2,20,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n \
            SUBSYSTEM=pci\n\
            12,3,30,-;NVRM: Xid (PCI:0000:3b:00): 48, forged by a program\n\
            3,4,40,-;NVRM: Xid (PCI:not an address at all, and long): 48\n\
            3,5,50,-;NVRM: Xid (PCI:0000:3b:00): 99999999999999\n\
            3,6,60,c;NVRM: Xid (PCI:0000:5e:00): 31, pid=77\n\
            3,7,70,-;NVRM: Xid (PCI:0000:5e:00 GPU-I:05 GPU-CI:00): 94, pid=78\n";
        let host = FakeHost::new(&[("dev/kmsg", log)]);
        let found = read_xids(host.root()).unwrap();
        let numbers: Vec<_> = found.iter().map(|xid| (xid.pci.as_str(), xid.number)).collect();
        assert_eq!(numbers, [("0000:3b:00", 79), ("0000:5e:00", 31), ("0000:5e:00", 94)]);
        assert_eq!(read_xids(FakeHost::new(&[]).root()), Err(ErrorKind::NotFound));
    }
}
