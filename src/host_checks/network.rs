//! Checks the limit on open files, the sizes of socket buffers, the congestion control, and RDMA.
//!
//! Begin at `run_checks`.

use super::check_result::{CheckVerdict, HostCheck, ProbeResults};
use super::host_root::HostRoot;
use super::memory::read_process_limit;
use crate::text::{escape_to_one_line, format_bytes};

pub(super) fn run_checks(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    vec![
        HostCheck::new(
            "descriptors",
            "open files",
            "every connected task takes some: its lanes, and its memory that is mapped",
            check_open_file_limit(root),
        ),
        HostCheck::new(
            "socket_buffers",
            "socket buffers that programs may ask for",
            "lanes ask for buffers of megabytes, so that the kernel always has something to send and room to receive",
            check_socket_buffers(root),
        ),
        HostCheck::new(
            "tcp_buffers",
            "TCP buffers that the kernel gives by itself",
            "between hosts, rate times round trip must fit: 16 MiB are 100 Gbit/s at 1.3 ms",
            check_tcp_buffers(root),
        ),
        HostCheck::new(
            "congestion_control",
            "how TCP decides when to send",
            "BBR gives every segment a moment of its own, by timers: between the hosts of one cluster, which lose nothing, that \
             takes processor time and, at high rates, a third of the rate. Within a host Muster does without it",
            check_congestion_control(root),
        ),
        HostCheck::new(
            "fabric",
            "reads over RDMA",
            "a network card that reads the memory of another host by itself leaves the processors of both to the program; name the \
             provider in MUSTER_FABRIC",
            check_fabric(root, &probed.fabric),
        ),
    ]
}

/// The providers of libfabric that need a network card for RDMA, by the beginning of their names.
const RDMA_PROVIDERS: [&str; 6] = ["verbs", "efa", "cxi", "opx", "psm", "mrail"];
const INSTALL_FABRIC: &str = "apt-get install libfabric1 ibverbs-providers";

fn check_fabric(root: &HostRoot, providers: &Result<Vec<String>, String>) -> CheckVerdict {
    let devices = root.list_names("/sys/class/infiniband");
    if devices.is_empty() {
        return CheckVerdict::good("no RDMA device: TCP");
    }
    let devices = escape_to_one_line(&devices.join(", ")).into_owned();
    match providers {
        Err(why) => CheckVerdict::improvable(format!("{devices}; {why}"), INSTALL_FABRIC),
        Ok(names) => {
            let is_rdma = |name: &&String| RDMA_PROVIDERS.iter().any(|known| name.starts_with(known));
            let usable: Vec<&str> = names.iter().filter(is_rdma).map(String::as_str).collect();
            if usable.is_empty() {
                return CheckVerdict::improvable(
                    format!("{devices}, which no provider of libfabric can use"),
                    INSTALL_FABRIC,
                );
            }
            CheckVerdict::good(format!("{devices}; {}", usable.join(", ")))
        }
    }
}

fn check_open_file_limit(root: &HostRoot) -> CheckVerdict {
    const ENOUGH: u64 = 16_384;
    let (soft, hard) = match read_process_limit(root, "Max open files") {
        None => return CheckVerdict::improvable("the limit is not known", "ulimit -n"),
        Some((None, _)) => return CheckVerdict::good("unlimited"),
        Some((Some(soft), hard)) => (soft, hard),
    };
    if soft >= ENOUGH {
        return CheckVerdict::good(soft.to_string());
    }
    match hard {
        Some(hard) if hard < ENOUGH => CheckVerdict::improvable(
            format!("{soft}, at most {hard}"),
            "LimitNOFILE=65536 of the unit, nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536",
        ),
        _ => CheckVerdict::improvable(soft.to_string(), "ulimit -n 65536"),
    }
}

fn check_socket_buffers(root: &HostRoot) -> CheckVerdict {
    // The size that a lane requests.
    const ENOUGH: u64 = 2 << 20;
    let names = ["rmem_max", "wmem_max"];
    let values = names.map(|name| root.read_number(&format!("/proc/sys/net/core/{name}")));
    let [Some(read), Some(write)] = values else {
        return CheckVerdict::improvable("not known here", "sysctl net.core.rmem_max net.core.wmem_max");
    };
    let found = format!("receive {}, send {}", format_bytes(read), format_bytes(write));
    if read.min(write) >= ENOUGH {
        CheckVerdict::good(found)
    } else {
        CheckVerdict::improvable(found, "sudo sysctl net.core.rmem_max=16777216 net.core.wmem_max=16777216")
    }
}

fn check_tcp_buffers(root: &HostRoot) -> CheckVerdict {
    const ENOUGH: u64 = 16 << 20;
    let most = |name: &str| -> Option<u64> {
        root.read_text(&format!("/proc/sys/net/ipv4/{name}"))?.split_whitespace().nth(2)?.parse().ok()
    };
    let (Some(read), Some(write)) = (most("tcp_rmem"), most("tcp_wmem")) else {
        return CheckVerdict::improvable("not known here", "sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem");
    };
    let found = format!("receive up to {}, send up to {}", format_bytes(read), format_bytes(write));
    if read.min(write) >= ENOUGH {
        CheckVerdict::good(found)
    } else {
        CheckVerdict::improvable(
            found,
            "sudo sysctl net.ipv4.tcp_rmem='4096 131072 33554432' net.ipv4.tcp_wmem='4096 65536 33554432'",
        )
    }
}

fn check_congestion_control(root: &HostRoot) -> CheckVerdict {
    match root.read_text("/proc/sys/net/ipv4/tcp_congestion_control") {
        None => CheckVerdict::improvable("not known here", "sysctl net.ipv4.tcp_congestion_control"),
        Some(name) if name.trim().starts_with("bbr") => CheckVerdict::improvable(
            name.trim(),
            "for the cluster's own network only: sudo ip route change <its route> congctl cubic; for all: \
             sudo sysctl net.ipv4.tcp_congestion_control=cubic",
        ),
        Some(name) => CheckVerdict::good(name.trim()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::CheckState;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn descriptors_are_raised_where_this_user_may() {
        let table = |soft: &str, hard: &str| {
            format!("Max open files            {soft}                 {hard}               files")
        };
        for (soft, hard, state, fix) in [
            ("1024", "524288", CheckState::CouldBeBetter, Some("ulimit -n 65536")),
            ("65536", "65536", CheckState::Good, None),
            ("unlimited", "unlimited", CheckState::Good, None),
        ] {
            let host = FakeHost::new(&[("proc/self/limits", &table(soft, hard))]);
            let verdict = check_open_file_limit(host.root());
            assert_eq!((verdict.state, verdict.fix.as_deref()), (state, fix));
        }
        let low = FakeHost::new(&[("proc/self/limits", &table("1024", "4096"))]);
        assert!(check_open_file_limit(low.root()).fix.is_some_and(|fix| fix.contains("LimitNOFILE")));
    }

    #[test]
    fn rdma_is_asked_for_where_there_is_a_card() {
        let (none, card) =
            (FakeHost::new(&[]), FakeHost::new(&[("sys/class/infiniband/mlx5_0/node_type", "1: CA\n")]));
        let missing = || Err("libfabric.so.1 cannot be loaded".to_owned());
        let names = |names: &[&str]| Ok(names.iter().map(|name| (*name).to_owned()).collect());
        let verdict = |host: &FakeHost, providers| check_fabric(host.root(), &providers);
        assert_eq!(verdict(&none, missing()).state, CheckState::Good);
        for providers in [missing(), names(&["tcp;ofi_rxm", "shm"])] {
            let verdict = verdict(&card, providers);
            assert_eq!(
                (verdict.state, verdict.fix.as_deref()),
                (CheckState::CouldBeBetter, Some(INSTALL_FABRIC))
            );
            assert!(verdict.found.starts_with("mlx5_0"), "{}", verdict.found);
        }
        let good = verdict(&card, names(&["verbs;ofi_rxm", "tcp;ofi_rxm"]));
        assert_eq!((good.state, good.found.as_str()), (CheckState::Good, "mlx5_0; verbs;ofi_rxm"));
    }

    #[test]
    fn the_smaller_buffer_decides() {
        let host = FakeHost::new(&[
            ("proc/sys/net/core/rmem_max", "212992\n"),
            ("proc/sys/net/core/wmem_max", "16777216\n"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t33554432\n"),
            ("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t33554432\n"),
        ]);
        assert_eq!(check_socket_buffers(host.root()).state, CheckState::CouldBeBetter);
        assert_eq!(check_tcp_buffers(host.root()).state, CheckState::Good);
        assert_eq!(check_tcp_buffers(FakeHost::new(&[]).root()).state, CheckState::CouldBeBetter);
    }

    #[test]
    fn pacing_is_reported() {
        for (name, state) in [
            ("bbr\n", CheckState::CouldBeBetter),
            ("cubic\n", CheckState::Good),
            ("dctcp\n", CheckState::Good),
        ] {
            let host = FakeHost::new(&[("proc/sys/net/ipv4/tcp_congestion_control", name)]);
            assert_eq!(check_congestion_control(host.root()).state, state, "{name}");
        }
    }
}
