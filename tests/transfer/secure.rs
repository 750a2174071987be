//! Tests of TLS between engines: bytes arrive complete and encrypted, and a stranger learns why it is refused.

use std::sync::atomic::Ordering;
use std::time::Duration;

use muster::tls::certificate_authority::{CertificateAuthority, CertificatePurpose};
use muster::transfer::{EngineConfig, PemCertificates, TransferEngine, TransportChoice, TransportKind};

use crate::cluster::{Cluster, assert_contents, done, member};
use crate::hostile::RecordingProxy;
use crate::network::{transfer_while, with_faults};

/// Returns a certificate for this name that `signed_by` has signed, with trust in `trusted`.
fn certificates(
    signed_by: &CertificateAuthority,
    trusted: &CertificateAuthority,
    name: &str,
) -> PemCertificates {
    signed(signed_by, trusted, CertificatePurpose::Server, name, 9)
}

fn signed(
    by: &CertificateAuthority,
    trusted: &CertificateAuthority,
    purpose: CertificatePurpose,
    name: &str,
    days: i64,
) -> PemCertificates {
    let made = by.issue_certificate(purpose, &[name.to_owned()], days).unwrap();
    let (cert, key) = (made.cert.into_bytes(), made.key.into_bytes());
    PemCertificates { cert, key, ca: trusted.certificate_pem().into_bytes(), name: None }
}

fn secure(config: &mut EngineConfig, certificates: &PemCertificates) {
    config.transport = TransportChoice::Tcp;
    config.tls = Some(certificates.clone());
}

#[test]
fn concurrent_transfers_in_both_directions_are_complete_with_and_without_a_token() {
    let authority = CertificateAuthority::new("of the engines").unwrap();
    let own = certificates(&authority, &authority, "engines");
    for (token, name) in [(None, None), (Some(b"known to all".to_vec()), Some("engines".to_owned()))] {
        let mut cluster = Cluster::with(2, |config| {
            secure(config, &PemCertificates { name: name.clone(), ..own.clone() });
            config.token = token.clone();
            config.lanes = 3;
        });
        let before: Vec<_> =
            cluster.engines.iter().map(|engine| RecordingProxy::before(engine.address().tcp[0])).collect();
        cluster.announce_other_addresses(before.iter().map(|before| before.address).collect());
        let mut moved = Vec::new();
        for (n, len) in [0, 1, 63, 4096, 8193, 16_384, 65_537, (3 << 20) + 5, 9 << 20].into_iter().enumerate()
        {
            for (from, to) in [(0, 1), (1, 0)] {
                let key = 2 * n as u64 + from as u64;
                let (source, target) = (cluster.filled(from, len, key), cluster.empty(to, len));
                moved.push((cluster.send(from, &source, to, &target, key), target, key));
            }
        }
        for ((sent, received), target, key) in moved {
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{key}");
            assert_contents(&target, key);
        }
        let link = &cluster.engines[0].links()[0];
        assert_eq!((link.kind, link.lanes), (TransportKind::Tcp, 4));
        let heard: Vec<_> = before.iter().flat_map(|before| before.heard.lock().unwrap().clone()).collect();
        assert!(heard.len() >= 4);
        for first in heard {
            // The first bytes are a TLS handshake, not a readable hello.
            assert_eq!(first[0], 22);
            assert!(!first.windows(8).any(|bytes| bytes == b"MUSTERX2"));
        }
    }
}

#[test]
fn under_tls_a_bad_network_is_survived_too() {
    let authority = CertificateAuthority::new("of the engines").unwrap();
    let own = certificates(&authority, &authority, "engines");
    let (cluster, faults) = with_faults(TransportChoice::Tcp, |config| secure(config, &own));
    assert_eq!(transfer_while(&cluster, 1000, 0, || ()), (None, None));
    let mut random = fastrand::Rng::with_seed(5);
    for round in 1..30u64 {
        let side = &faults[round as usize % 2];
        match round % 5 {
            0 => side.limit_io_size(random.usize(1..3000)),
            1 => side.truncate_sends(2),
            // A changed record ends its connection: none of its bytes is accepted.
            2 => side.corrupt_chunks(1),
            3 => side.delay_receives(Duration::from_micros(random.u64(0..500))),
            _ => faults.iter().for_each(muster::transfer::FaultInjector::clear_faults),
        }
        let outcomes = transfer_while(&cluster, random.usize(1..4 << 20), round, || {
            if round % 3 == 0 {
                std::thread::sleep(Duration::from_micros(random.u64(0..20_000)));
                side.reset(|at| at == round as usize % 4);
            }
        });
        assert_eq!(outcomes, (None, None), "round {round}");
    }
    let counts = cluster.engines[1].counts();
    assert_eq!(counts.damaged.load(Ordering::Relaxed), 0);
    assert!(counts.lanes_lost.load(Ordering::Relaxed) > 3);
}

/// Returns the errors of two engines that cannot connect.
fn errors_of_refused_engines(
    first: Option<&PemCertificates>,
    second: Option<&PemCertificates>,
) -> [String; 2] {
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.tls = if config.here.task.0 == 0 { first } else { second }.cloned();
        config.dial_timeout = Duration::from_millis(300);
    });
    // One after the other, so that each reports the result of its own dialling.
    let source = cluster.filled(0, 1000, 1);
    let out = crate::cluster::outgoing(&source, 0, 1, 1);
    let first = cluster.engines[0].transfer(&[], vec![out], muster::transfer::LaunchOptions::default());
    let first = done(&first).unwrap_err().to_string();
    let target = cluster.empty(1, 1000);
    let into = crate::cluster::incoming(&target, 0, 1, 1);
    let second = cluster.engines[1].transfer(&[], vec![into], muster::transfer::LaunchOptions::default());
    let second = done(&second).unwrap_err().to_string();
    assert!(cluster.engines.iter().all(|engine| engine.links().is_empty()));
    println!("{first}\n{second}");
    [first, second]
}

#[test]
fn a_peer_with_a_wrong_certificate_is_refused_with_the_reason() {
    let (ours, theirs) =
        (CertificateAuthority::new("ours").unwrap(), CertificateAuthority::new("theirs").unwrap());
    let own = certificates(&ours, &ours, "engines");
    let foreign = "does not come from an authority of this engine";
    let away = "turns this engine's certificate away";

    let [first, second] =
        errors_of_refused_engines(Some(&own), Some(&certificates(&theirs, &theirs, "engines")));
    assert!(first.contains(foreign) && second.contains(foreign));

    let [first, second] =
        errors_of_refused_engines(Some(&own), Some(&certificates(&theirs, &ours, "engines")));
    assert!(first.contains(foreign) && second.contains(away));

    let named = PemCertificates { name: Some("engines".to_owned()), ..own.clone() };
    let [first, second] =
        errors_of_refused_engines(Some(&named), Some(&certificates(&ours, &ours, "something-else")));
    assert!(first.contains("not for the name") && second.contains(away));

    let [first, second] = errors_of_refused_engines(
        Some(&own),
        Some(&signed(&ours, &ours, CertificatePurpose::Server, "engines", -1)),
    );
    assert!(first.contains("has expired") && second.contains(away));

    let [first, second] = errors_of_refused_engines(
        Some(&own),
        Some(&signed(&ours, &ours, CertificatePurpose::Client, "engines", 9)),
    );
    assert!(first.contains("not good for a server") && second.contains(away));
}

#[test]
fn plaintext_and_tls_do_not_mix() {
    let authority = CertificateAuthority::new("ours").unwrap();
    let own = certificates(&authority, &authority, "engines");
    let [first, second] = errors_of_refused_engines(Some(&own), None);
    assert!(first.contains("hung up in the TLS handshake"));
    assert!(second.contains("it speaks TLS only"));
}

#[test]
fn a_right_certificate_does_not_stand_for_the_token() {
    let authority = CertificateAuthority::new("ours").unwrap();
    let own = certificates(&authority, &authority, "engines");
    let cluster = Cluster::with(2, |config| {
        secure(config, &own);
        config.dial_timeout = Duration::from_millis(300);
        config.token = Some(vec![config.here.task.0 as u8]);
    });
    let (source, target) = (cluster.filled(0, 100, 0), cluster.empty(1, 100));
    let (sent, _received) = cluster.send(0, &source, 1, &target, 0);
    let error = done(&sent).unwrap_err().to_string();
    assert!(error.contains("token"), "{error}");
}

#[test]
fn unusable_certificates_fail_at_start() {
    let authority = CertificateAuthority::new("ours").unwrap();
    let [own, other] = ["a", "b"].map(|name| certificates(&authority, &authority, name));
    for (certificates, said) in [
        (PemCertificates { cert: b"nothing".to_vec(), ..own.clone() }, "the engine's certificate"),
        (PemCertificates { key: Vec::new(), ..own.clone() }, "the engine's key"),
        (PemCertificates { key: other.key, ..own.clone() }, "certificate and key"),
        (PemCertificates { ca: Vec::new(), ..own.clone() }, "the engine's authorities"),
        (PemCertificates { name: Some("not a name".to_owned()), ..own.clone() }, "the name of the engines"),
    ] {
        let mut config = EngineConfig::new(member(0, 0), vec![crate::cluster::device(0)]);
        config.tls = Some(certificates);
        let error = TransferEngine::start(config).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    assert!(!format!("{own:?}").contains("PRIVATE"));
}
