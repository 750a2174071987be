//! Checks the health of GPUs, by what NVML, the driver and the kernel's log say of them.
//!
//! A host without a GPU has none of these checks. Begin at `run_checks`.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use muster_gpu::{GpuHealth, InstalledGpu, NvLinkHealth, Slowdown};

use super::check_result::{CheckState, CheckVerdict, HostCheck, ProbeResults, ProbedGpu, ProbedGpus};
use super::gpu::has_driver_or_gpu;
use super::host_root::HostRoot;
use super::kernel_log::{Xid, XidBlame, meaning_of, read_xids};
use crate::text::format_bytes;

/// The most GPUs, links or errors that a text names one by one.
const NAMED_MAX: usize = 4;

pub(super) fn run_checks(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    let installed = match &probed.gpu_health {
        Ok(gpus) if !gpus.is_empty() => gpus,
        Ok(_) if has_driver_or_gpu(root) => {
            let verdict = CheckVerdict::missing(
                "the driver has none",
                "sudo dmesg | grep -e NVRM -e Xid   # they have fallen off the bus, or this container was given none",
            );
            return vec![reached(verdict)];
        }
        Err(error) if has_driver_or_gpu(root) => {
            let verdict = CheckVerdict::missing(
                error.clone(),
                "nvidia-smi   # says what it lacks; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            );
            return vec![reached(verdict)];
        }
        _ => return Vec::new(),
    };
    let healthy: Healthy =
        installed.iter().filter_map(|gpu| Some((gpu.number, gpu.health.as_ref().ok()?))).collect();
    let mut checks = vec![
        reached(check_reached(installed)),
        HostCheck::new(
            "gpu_errors",
            "GPU errors in the kernel's log",
            "a GPU that the driver has reported fails again, and every collective with it",
            check_xids(read_xids(root)),
        ),
    ];
    if !healthy.is_empty() {
        checks.extend(check_health(&healthy));
        checks.extend(check_access(probed));
    }
    checks
}

/// Returns the checks of what NVML tells.
fn check_health(healthy: &Healthy) -> Vec<HostCheck> {
    let mut checks = vec![
        HostCheck::new(
            "gpu_ecc",
            "errors of GPU memory",
            "an error that cannot be corrected ends every program of its GPU; without ECC it goes unseen",
            check_ecc(healthy),
        ),
        HostCheck::new(
            "gpu_persistence",
            "GPUs kept ready",
            "else the driver starts a GPU anew whenever a program comes, which takes seconds",
            check_persistence(healthy),
        ),
        HostCheck::new(
            "gpu_clocks",
            "clocks of GPUs",
            "one slow GPU holds up the collectives of all",
            check_clocks(healthy),
        ),
        HostCheck::new(
            "gpu_pcie",
            "PCIe lanes of GPUs",
            "bytes between a GPU and the host go through them",
            check_pcie(healthy),
        ),
    ];
    if healthy.iter().any(|(_, health)| !health.nvlinks.is_empty()) {
        checks.push(HostCheck::new(
            "gpu_nvlink",
            "NVLinks",
            "collectives go as fast as the slowest link between the GPUs",
            check_nvlinks(healthy),
        ));
    }
    checks
}

/// Returns the checks of what the driver permits.
fn check_access(probed: &ProbeResults) -> Vec<HostCheck> {
    let Ok(ProbedGpus { gpus, page_locked }) = &probed.gpu_memory else { return Vec::new() };
    let mut checks = vec![HostCheck::new(
        "gpu_page_locked",
        "page-locked memory for GPUs",
        "bytes of GPUs go to other hosts through page-locked memory of this one",
        match page_locked {
            Ok(bytes) => CheckVerdict::good(format!("{} can be page-locked", format_bytes(*bytes))),
            Err(error) => CheckVerdict::missing(
                error.clone(),
                "free -g   # then give the container more memory, or lower --memory of its other programs",
            ),
        },
    )];
    if gpus.len() > 1 {
        checks.push(HostCheck::new(
            "gpu_peer_access",
            "GPUs that reach each other's memory",
            "a GPU copies from another one of this host directly, else through host memory",
            check_peers(gpus),
        ));
    }
    checks
}

/// The GPUs whose health is known, by number.
type Healthy<'a> = Vec<(u32, &'a GpuHealth)>;

fn reached(verdict: CheckVerdict) -> HostCheck {
    HostCheck::new(
        "gpu_reached",
        "GPUs that answer",
        "a GPU that does not answer is of no use to a job",
        verdict,
    )
}

fn check_reached(installed: &[InstalledGpu]) -> CheckVerdict {
    let lost: Vec<_> =
        installed.iter().filter_map(|gpu| Some((gpu.number, gpu.health.as_ref().err()?))).collect();
    match lost.first() {
        None => CheckVerdict::good(format!("{} of {}", installed.len(), installed.len())),
        Some((first, failure)) => CheckVerdict::missing(
            format!("{}: {}", gpus(lost.iter().map(|(number, _)| *number)), failure.reason),
            if failure.is_lost {
                format!("sudo nvidia-smi --gpu-reset -i {first}   # if that fails, restart the host")
            } else {
                format!("nvidia-smi -q -i {first}   # this user or container may not have the GPU")
            },
        ),
    }
}

/// Names GPUs by their numbers.
fn gpus(numbers: impl Iterator<Item = u32>) -> String {
    let all: Vec<String> = numbers.map(|number| number.to_string()).collect();
    match all.get(NAMED_MAX..).filter(|more| !more.is_empty()) {
        Some(more) => format!("GPUs {} and {} more", all[..NAMED_MAX].join(", "), more.len()),
        None if all.len() == 1 => format!("GPU {}", all[0]),
        None => format!("GPUs {}", all.join(", ")),
    }
}

/// Names those GPUs of which something is true; none if it is true of no GPU.
fn gpus_where(all: &Healthy, is_so: impl Fn(&GpuHealth) -> bool) -> Option<(u32, String)> {
    let numbers: Vec<u32> =
        all.iter().filter(|(_, health)| is_so(health)).map(|(number, _)| *number).collect();
    Some((*numbers.first()?, gpus(numbers.into_iter())))
}

fn check_xids(found: Result<Vec<Xid>, ErrorKind>) -> CheckVerdict {
    let xids = match found {
        Ok(xids) => xids,
        Err(ErrorKind::PermissionDenied) => {
            return CheckVerdict::improvable("the log is not readable for this user", "sudo muster doctor");
        }
        Err(_) => {
            return CheckVerdict::without_fix(
                CheckState::CouldBeBetter,
                "no log is to be seen",
                Some("this container has no kernel log: look at that of its host"),
            );
        }
    };
    // By device and number, the most recent last.
    let mut counts: BTreeMap<(&str, u32), usize> = BTreeMap::new();
    for xid in &xids {
        *counts.entry((&xid.pci, xid.number)).or_default() += 1;
    }
    let of = |blame| {
        let all = counts.iter().filter(move |((_, number), _)| meaning_of(*number).blame == blame);
        let texts: Vec<String> = all
            .map(|((pci, number), count)| {
                format!("{pci} Xid {number} ({}), {count} times", meaning_of(*number).text)
            })
            .collect();
        let more = texts.len().saturating_sub(2);
        let named = texts.into_iter().take(2).collect::<Vec<_>>().join("; ");
        if more == 0 { named } else { format!("{named}; {more} more kinds") }
    };
    let (device, program) = (of(XidBlame::Device), of(XidBlame::Program));
    if !device.is_empty() {
        return CheckVerdict::missing(
            device,
            "sudo dmesg | grep Xid   # exclude the host's tasks, reset the GPU, and have it repaired if that comes again",
        );
    }
    let unknown = of(XidBlame::Unknown);
    if !unknown.is_empty() {
        return CheckVerdict::improvable(unknown, "sudo dmesg | grep Xid   # and look the number up");
    }
    CheckVerdict::good(if program.is_empty() {
        "none".to_owned()
    } else {
        format!("of programs only: {program}")
    })
}

fn check_ecc(all: &Healthy) -> CheckVerdict {
    let rows = |health: &GpuHealth| health.rows.unwrap_or_default();
    if let Some((first, named)) = gpus_where(all, |health| rows(health).has_failed) {
        return CheckVerdict::missing(
            format!("{named}: a row of memory failed and could not be replaced"),
            format!("nvidia-smi -q -d ROW_REMAPPER -i {first}   # have the GPU replaced"),
        );
    }
    if let Some((first, named)) = gpus_where(all, |health| rows(health).is_pending) {
        return CheckVerdict::missing(
            format!("{named}: the replacement of a row of memory is pending"),
            format!("sudo nvidia-smi --gpu-reset -i {first}   # after its programs have ended"),
        );
    }
    if let Some((first, named)) = gpus_where(all, |health| health.uncorrected_errors.unwrap_or(0) > 0) {
        let most = all.iter().filter_map(|(_, health)| health.uncorrected_errors).max().unwrap_or(0);
        return CheckVerdict::missing(
            format!("{named}: up to {most} errors that could not be corrected, since the driver was loaded"),
            format!("sudo nvidia-smi --gpu-reset -i {first}   # after its programs have ended"),
        );
    }
    if let Some((_, named)) = gpus_where(all, |health| health.has_ecc == Some(false)) {
        return CheckVerdict::improvable(
            format!("{named}: ECC is off"),
            "sudo nvidia-smi --ecc-config=1   # then reset the GPUs, or restart the host",
        );
    }
    if all.iter().all(|(_, health)| health.has_ecc.is_none()) {
        return CheckVerdict::without_fix(
            CheckState::CouldBeBetter,
            "these GPUs do not count errors",
            Some("GPUs of this kind have no ECC"),
        );
    }
    let replaced: u32 = all.iter().map(|(_, health)| rows(health).corrected + rows(health).uncorrected).sum();
    CheckVerdict::good(match replaced {
        0 => "none, and no row was replaced".to_owned(),
        rows => format!("none now; rows replaced earlier: {rows}"),
    })
}

fn check_persistence(all: &Healthy) -> CheckVerdict {
    match gpus_where(all, |health| health.is_persistent == Some(false)) {
        Some((_, named)) => CheckVerdict::improvable(
            format!("{named}: persistence mode is off"),
            "sudo nvidia-smi -pm 1   # or start nvidia-persistenced",
        ),
        None if all.iter().any(|(_, health)| health.is_persistent.is_none()) => not_told(),
        None => CheckVerdict::good("persistence mode is on"),
    }
}

fn check_clocks(all: &Healthy) -> CheckVerdict {
    let texts = [
        (
            Slowdown::SevereHeat,
            "so hot that the hardware slows it",
            "check the cooling of the host: fans, filters, liquid",
        ),
        (
            Slowdown::PowerBrake,
            "slowed by the power supply",
            "check the power supplies of the host and of the rack",
        ),
        (
            Slowdown::Hardware,
            "slowed by the hardware",
            "check the cooling and the power supplies of the host",
        ),
        (
            Slowdown::Heat,
            "so hot that the driver slows it",
            "check the cooling of the host: fans, filters, liquid",
        ),
    ];
    for (reason, text, action) in texts {
        if let Some((first, named)) = gpus_where(all, |health| is_slowed_by(health, reason)) {
            return CheckVerdict::improvable(
                format!("{named}: {text}"),
                format!("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {first}   # {action}"),
            );
        }
    }
    match gpus_where(all, |health| is_slowed_by(health, Slowdown::PowerLimit)) {
        // That is normal at full load, as long as all GPUs have the same limit.
        Some((_, named)) => CheckVerdict::good(format!("{named}: at the limit of power, as under full load")),
        None if all.iter().any(|(_, health)| health.slowdowns.is_none()) => not_told(),
        None => CheckVerdict::good("nothing slows them"),
    }
}

fn is_slowed_by(health: &GpuHealth, reason: Slowdown) -> bool {
    health.slowdowns.as_ref().is_some_and(|all| all.contains(&reason))
}

/// The result of a check whose facts the driver does not report.
fn not_told() -> CheckVerdict {
    CheckVerdict::without_fix(
        CheckState::CouldBeBetter,
        "the driver does not say",
        Some("GPUs of this kind, or this virtual machine, do not report it"),
    )
}

fn check_pcie(all: &Healthy) -> CheckVerdict {
    let is_narrow = |health: &GpuHealth| health.pcie_lanes.is_some_and(|(now, most)| now < most);
    let Some((first, named)) = gpus_where(all, is_narrow) else {
        let lanes = all.iter().filter_map(|(_, health)| Some(health.pcie_lanes?.0)).min();
        return lanes.map_or_else(not_told, |lanes| CheckVerdict::good(format!("{lanes} lanes each")));
    };
    let (now, most) = all
        .iter()
        .filter(|(_, health)| is_narrow(health))
        .filter_map(|(_, health)| health.pcie_lanes)
        .min()
        .unwrap_or_default();
    CheckVerdict::improvable(
        format!("{named}: {now} of {most} lanes"),
        format!(
            "nvidia-smi -q -i {first} | grep -A3 'Link Width'   # seat the card anew, or use a wider slot"
        ),
    )
}

fn check_nvlinks(all: &Healthy) -> CheckVerdict {
    let of = |is_so: fn(&NvLinkHealth) -> bool| -> Vec<String> {
        let links = all.iter().flat_map(|(gpu, health)| health.nvlinks.iter().map(move |link| (gpu, link)));
        links.filter(|(_, link)| is_so(link)).map(|(gpu, link)| format!("{gpu}.{}", link.number)).collect()
    };
    let named = |links: &[String]| {
        let first = links.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
        let more = links.len().saturating_sub(NAMED_MAX);
        if more == 0 { first } else { format!("{first} and {more} more") }
    };
    let (down, bad, up) = (
        of(|link| !link.is_up),
        of(|link| link.errors.is_some_and(|errors| errors > 0)),
        of(|link| link.is_up),
    );
    if up.is_empty() {
        return CheckVerdict::without_fix(
            CheckState::CouldBeBetter,
            "no link is up",
            Some("GPUs without a bridge, a switch or another GPU beside them have nothing to link to"),
        );
    }
    if !down.is_empty() {
        return CheckVerdict::improvable(
            format!("down (GPU.link): {}", named(&down)),
            "nvidia-smi nvlink --status   # without a bridge or a switch at it that is normal; else restart nvidia-fabricmanager, then the host",
        );
    }
    if !bad.is_empty() {
        return CheckVerdict::improvable(
            format!("errors on (GPU.link): {}", named(&bad)),
            "nvidia-smi nvlink --errorcounters   # have the link repaired if they grow",
        );
    }
    CheckVerdict::good(format!("{} up, without errors", up.len()))
}

fn check_peers(gpus: &[ProbedGpu]) -> CheckVerdict {
    let pairs: Vec<String> = (0..gpus.len())
        .flat_map(|from| (0..gpus.len()).map(move |to| (from, to)))
        .filter(|(from, to)| from != to && !gpus[*from].peers.contains(&(*to as u32)))
        .map(|(from, to)| format!("GPU {from} that of GPU {to}"))
        .collect();
    let Some(first) = pairs.first() else {
        return CheckVerdict::good(format!("all {}", gpus.len()));
    };
    CheckVerdict::improvable(
        format!("{} of {} pairs cannot, such as {first}", pairs.len(), gpus.len() * (gpus.len() - 1)),
        "nvidia-smi topo -p2p r   # ACS or an IOMMU may keep them apart; cards for desktops cannot",
    )
}

#[cfg(test)]
mod tests {
    use muster_gpu::{RemappedRows, UnreachableGpu};

    use super::*;
    use crate::host_checks::fake_host::FakeHost;

    fn healthy() -> GpuHealth {
        GpuHealth {
            name: "H200".to_owned(),
            pci: "00000000:3B:00.0".to_owned(),
            is_persistent: Some(true),
            has_ecc: Some(true),
            uncorrected_errors: Some(0),
            rows: Some(RemappedRows::default()),
            slowdowns: Some(Vec::new()),
            pcie_lanes: Some((16, 16)),
            nvlinks: (0..18).map(|number| NvLinkHealth { number, is_up: true, errors: Some(0) }).collect(),
        }
    }

    /// A host with eight GPUs, of which `change` makes the second one another one.
    fn probed(change: impl FnOnce(&mut GpuHealth)) -> ProbeResults {
        let mut all = vec![healthy(); 8];
        change(&mut all[1]);
        let installed = (0..).zip(all).map(|(number, health)| InstalledGpu { number, health: Ok(health) });
        let peers = |own: u32| (0..8).filter(|other| *other != own).collect();
        let gpu = |number| ProbedGpu { name: "H200".to_owned(), memory: 141 << 30, peers: peers(number) };
        let unknown = || Err("not probed".to_owned());
        ProbeResults {
            dev_shm: None,
            memory_file: unknown(),
            shared_memory: unknown(),
            process_memory: unknown(),
            gpu_memory: Ok(ProbedGpus { gpus: (0..8).map(gpu).collect(), page_locked: Ok(128 << 20) }),
            fabric: Err("not probed".to_owned()),
            gpu_health: Ok(installed.collect()),
            library_path: String::new(),
        }
    }

    fn check(id: &str, log: &str, probed: &ProbeResults) -> HostCheck {
        let host = FakeHost::new(&[("dev/kmsg", log)]);
        let mut checks = run_checks(host.root(), probed);
        let at = checks.iter().position(|check| check.id == id).expect("there is such a check");
        checks.swap_remove(at)
    }

    #[test]
    fn healthy_gpus_have_nothing_to_improve() {
        let host = FakeHost::new(&[("dev/kmsg", "6,1,1,-;booted\n")]);
        let checks = run_checks(host.root(), &probed(|_| ()));
        assert_eq!(checks.len(), 9);
        for check in checks {
            assert_eq!(check.state, CheckState::Good, "{check:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_gpu_is_found_and_the_gpu_is_named() {
        use CheckState::{CouldBeBetter, Missing};
        let rows =
            |is_pending, has_failed| Some(RemappedRows { is_pending, has_failed, ..Default::default() });
        type Change = fn(&mut GpuHealth);
        let cases: [(&str, CheckState, &str, Change); 9] = [
            ("gpu_ecc", Missing, "GPU 1: up to 3 errors", |gpu| gpu.uncorrected_errors = Some(3)),
            ("gpu_ecc", CouldBeBetter, "GPU 1: ECC is off", |gpu| gpu.has_ecc = Some(false)),
            ("gpu_persistence", CouldBeBetter, "GPU 1: persistence", |gpu| gpu.is_persistent = Some(false)),
            ("gpu_clocks", CouldBeBetter, "GPU 1: so hot that the hardware", |gpu| {
                gpu.slowdowns = Some(vec![Slowdown::PowerLimit, Slowdown::SevereHeat]);
            }),
            ("gpu_clocks", CouldBeBetter, "GPU 1: slowed by the power supply", |gpu| {
                gpu.slowdowns = Some(vec![Slowdown::PowerBrake]);
            }),
            ("gpu_clocks", CheckState::Good, "GPU 1: at the limit of power", |gpu| {
                gpu.slowdowns = Some(vec![Slowdown::PowerLimit]);
            }),
            ("gpu_pcie", CouldBeBetter, "GPU 1: 8 of 16 lanes", |gpu| gpu.pcie_lanes = Some((8, 16))),
            ("gpu_nvlink", CouldBeBetter, "down (GPU.link): 1.3", |gpu| gpu.nvlinks[3].is_up = false),
            ("gpu_nvlink", CouldBeBetter, "1.0, 1.1, 1.2, 1.3 and 14 more", |gpu| {
                gpu.nvlinks.iter_mut().for_each(|link| link.errors = Some(1));
            }),
        ];
        for (id, state, found, change) in cases {
            let check = check(id, "", &probed(change));
            assert_eq!(check.state, state, "{check:?}");
            assert!(check.found.contains(found), "{found:?} is not in {check:?}");
        }
        for (pending, failed, found) in [(true, false, "is pending"), (true, true, "could not be replaced")] {
            let check = check("gpu_ecc", "", &probed(|gpu| gpu.rows = rows(pending, failed)));
            assert!(check.state == Missing && check.found.contains(found), "{check:?}");
        }
    }

    #[test]
    fn a_gpu_that_does_not_answer_is_named_with_the_reason() {
        let mut probed = probed(|_| ());
        if let Ok(installed) = &mut probed.gpu_health {
            let reason = "the target GPU has fallen off the bus".to_owned();
            installed[5].health = Err(UnreachableGpu { is_lost: true, reason });
        }
        let found = check("gpu_reached", "", &probed);
        assert_eq!(found.found, "GPU 5: the target GPU has fallen off the bus");
        assert!(found.fix.is_some_and(|fix| fix.contains("--gpu-reset -i 5")));
        // A GPU that this user may not have is not reset. Of GPUs that do not answer, nothing else is said.
        if let Ok(installed) = &mut probed.gpu_health {
            for gpu in installed {
                let reason = "the user does not have permission".to_owned();
                gpu.health = Err(UnreachableGpu { is_lost: false, reason });
            }
        }
        let checks = run_checks(FakeHost::new(&[]).root(), &probed);
        let ids: Vec<_> = checks.iter().map(|check| check.id).collect();
        assert_eq!(ids, ["gpu_reached", "gpu_errors"]);
        assert!(checks[0].fix.as_ref().is_some_and(|fix| !fix.contains("reset")), "{checks:?}");
    }

    #[test]
    fn errors_in_the_kernels_log_are_told_by_whom_they_concern() {
        let line =
            |device: &str, number| format!("3,1,1,-;NVRM: Xid (PCI:0000:{device}:00): {number}, pid=1\n");
        let all = probed(|_| ());
        let program = check("gpu_errors", &line("3b", 31), &all);
        assert_eq!(program.state, CheckState::Good);
        assert!(program.found.contains("of programs only: 0000:3b:00 Xid 31"), "{program:?}");
        let both = line("3b", 31) + &line("5e", 79) + &line("5e", 79);
        let device = check("gpu_errors", &both, &all);
        assert_eq!(device.state, CheckState::Missing);
        assert_eq!(device.found, "0000:5e:00 Xid 79 (the GPU has fallen off the bus), 2 times");
        let unknown = check("gpu_errors", &line("3b", 154), &all);
        assert_eq!(unknown.state, CheckState::CouldBeBetter);
        let many: String = (48..148).map(|number| line("5e", number)).collect();
        assert!(check("gpu_errors", &many, &all).found.len() < 300);
    }

    #[test]
    fn gpus_that_do_not_reach_each_other_are_named() {
        let mut probed = probed(|_| ());
        if let Ok(ProbedGpus { gpus, .. }) = &mut probed.gpu_memory {
            gpus[2].peers.retain(|other| *other != 6);
        }
        let check = check("gpu_peer_access", "", &probed);
        assert_eq!(check.found, "1 of 56 pairs cannot, such as GPU 2 that of GPU 6");
    }

    #[test]
    fn a_host_without_gpus_has_none_of_these_checks() {
        let none =
            ProbeResults { gpu_health: Err("NVML: a library is missing".to_owned()), ..probed(|_| ()) };
        assert_eq!(run_checks(FakeHost::new(&[]).root(), &none), []);
        // With a driver, a management library that is missing is a finding.
        let checks = run_checks(FakeHost::new(&[("dev/nvidia0", "")]).root(), &none);
        assert_eq!(checks.len(), 1);
        assert!(checks[0].state == CheckState::Missing && checks[0].found.contains("NVML"), "{checks:?}");
    }
}
