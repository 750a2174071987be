//! The performance targets of Muster.

use crate::engines::{EngineCase, Figure};
use crate::report::Results;
use crate::shape::Shape;

/// A target, and whether it is met.
pub struct Verdict {
    pub text: String,
    pub met: bool,
}

pub struct Target {
    /// Whether the target applies to a shape.
    of: fn(Shape) -> bool,
    subject: EngineCase,
    bound: Bound,
}

enum Bound {
    /// At least this many times the rate of another subject.
    Times(EngineCase, f64),
    /// At least this many times the rate of the best of other subjects.
    TimesBest(&'static [EngineCase], f64),
    /// At least this many times the rate of the best of other subjects in single messages of the same size.
    TimesBestSingle(&'static [EngineCase], f64),
    /// One at a time at least this many times as quick as another subject.
    TimesAsQuick(EngineCase, f64),
    /// A call of launch takes less than this many microseconds more than another subject's.
    LaunchWithin(EngineCase, f64),
    /// Less than this, of a figure in this unit.
    Under(&'static str, fn(&Figure) -> Option<f64>, f64),
}

const fn is_large(shape: Shape) -> bool {
    shape.size >= 16 << 20
}

const fn is_medium_or_large(shape: Shape) -> bool {
    shape.size >= 1 << 20
}

const fn is_coalesced(shape: Shape) -> bool {
    shape.size == 4 << 10 && shape.batch > 1
}

const fn is_single_small(shape: Shape) -> bool {
    shape.size == 4 << 10 && shape.batch == 1
}

const PEERS: &[EngineCase] = &[
    EngineCase::NixlTcp,
    EngineCase::NixlTcpPolled,
    EngineCase::Mooncake,
    EngineCase::Gloo,
    EngineCase::Jax,
];

/// The targets of the suite of engines.
pub const ENGINE_TARGETS: [Target; 18] = [
    Target { of: is_large, subject: EngineCase::MusterShm, bound: Bound::Times(EngineCase::Memcpy2, 0.85) },
    Target { of: is_large, subject: EngineCase::MusterShm, bound: Bound::Times(EngineCase::NixlShm, 2.0) },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcpUnchecked,
        bound: Bound::Times(EngineCase::Tcp2, 0.85),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcpUnchecked,
        bound: Bound::Times(EngineCase::Tcp2Unpaced, 0.85),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::Tcp2, 0.75),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::Tcp2Unpaced, 0.75),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::Mooncake, 2.0),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::NixlTcp, 2.0),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::Jax, 2.0),
    },
    // Beside settings by which NIXL polls, there is only the limit of the machine to be reached.
    Target {
        of: is_large,
        subject: EngineCase::MusterShm,
        bound: Bound::Times(EngineCase::NixlShmPolled, 2.0),
    },
    Target {
        of: is_medium_or_large,
        subject: EngineCase::MusterTcp,
        bound: Bound::Times(EngineCase::NixlTcpPolled, 1.0),
    },
    Target { of: is_coalesced, subject: EngineCase::MusterTcp, bound: Bound::TimesBestSingle(PEERS, 10.0) },
    // The same batches given to the others as well.
    Target { of: is_coalesced, subject: EngineCase::MusterTcp, bound: Bound::TimesBest(PEERS, 10.0) },
    Target {
        of: is_single_small,
        subject: EngineCase::MusterShm,
        bound: Bound::Under("us one way p50", |figure| figure.p50_us, 8.0),
    },
    Target {
        of: is_single_small,
        subject: EngineCase::MusterShm,
        bound: Bound::Under("us one way p99", |figure| figure.p99_us, 40.0),
    },
    // On one processor, where no thread spins before it sleeps, because the other side could not run
    // meanwhile.
    Target {
        of: is_single_small,
        subject: EngineCase::MusterShmBeside,
        bound: Bound::Under("us one way p50", |figure| figure.p50_us, 8.0),
    },
    Target {
        of: is_single_small,
        subject: EngineCase::MusterShmBeside,
        bound: Bound::Under("us one way p99", |figure| figure.p99_us, 40.0),
    },
    Target {
        of: is_single_small,
        subject: EngineCase::MusterShm,
        bound: Bound::Under("us slowest of 1,000 prepares", |figure| figure.prepare_max_us, 1000.0),
    },
];

const fn is_any_shape(_: Shape) -> bool {
    true
}

/// The target of an array beside the engine itself, which moves memory of the same kind, prepared if that is.
const fn targets_beside_engine(subject: EngineCase, engine: EngineCase) -> [Target; 2] {
    [
        Target { of: is_medium_or_large, subject, bound: Bound::Times(engine, 0.9) },
        Target { of: is_medium_or_large, subject, bound: Bound::TimesAsQuick(engine, 0.9) },
    ]
}

/// The target of an array beside JAX's own ways.
const fn targets_beside_jax(subject: EngineCase) -> [Target; 4] {
    [
        Target { of: is_any_shape, subject, bound: Bound::Times(EngineCase::DevicePut, 3.0) },
        Target { of: is_any_shape, subject, bound: Bound::TimesAsQuick(EngineCase::DevicePut, 3.0) },
        Target { of: is_any_shape, subject, bound: Bound::Times(EngineCase::Jax, 3.0) },
        Target { of: is_any_shape, subject, bound: Bound::TimesAsQuick(EngineCase::Jax, 3.0) },
    ]
}

/// The targets of the suite of arrays.
pub const ARRAY_TARGETS: [Target; 21] = {
    let [buffers, buffers_alone] = targets_beside_engine(EngineCase::ArraysBuffers, EngineCase::MusterShm);
    let [prepared, prepared_alone] = targets_beside_engine(EngineCase::ArraysPrepared, EngineCase::MusterPvm);
    let [arrays, arrays_alone] = targets_beside_engine(EngineCase::Arrays, EngineCase::MusterPvmUnprepared);
    let [a, b, c, d] = targets_beside_jax(EngineCase::ArraysBuffers);
    let [e, f, g, h] = targets_beside_jax(EngineCase::ArraysPrepared);
    let [i, j, k, l] = targets_beside_jax(EngineCase::Arrays);
    let launch = Bound::LaunchWithin(EngineCase::MusterShm, 5.0);
    let launch = Target { of: is_single_small, subject: EngineCase::ArraysBuffers, bound: launch };
    let launch_of_jax = Bound::LaunchWithin(EngineCase::MusterPvm, 5.0);
    let launch_of_jax =
        Target { of: is_single_small, subject: EngineCase::ArraysPrepared, bound: launch_of_jax };
    let what = "of its time another Python thread waits for the interpreter while 1 GiB moves";
    let thread = Bound::Under(what, |figure| figure.thread_loss, 0.05);
    let thread = Target { of: is_single_small, subject: EngineCase::ArraysBuffers, bound: thread };
    [
        buffers,
        buffers_alone,
        prepared,
        prepared_alone,
        arrays,
        arrays_alone,
        a,
        b,
        c,
        d,
        e,
        f,
        g,
        h,
        i,
        j,
        k,
        l,
        launch,
        launch_of_jax,
        thread,
    ]
};

/// Returns the state of these targets, as far as they were measured.
pub fn verdicts(results: &Results<'_>, targets: &[Target]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for target in targets {
        for shape in results.shapes().filter(|shape| (target.of)(*shape)) {
            let subject = target.subject;
            let (found, met, what): (_, fn(f64, f64) -> bool, _) = match &target.bound {
                Bound::Times(other, _) => (
                    results.ratio(shape, subject, &[*other]),
                    |found, bound| found >= bound,
                    format!("times {other}"),
                ),
                Bound::TimesBest(others, _) => (
                    results.ratio(shape, subject, others),
                    |found, bound| found >= bound,
                    "times the best other engine, with the same batches".to_owned(),
                ),
                Bound::TimesBestSingle(others, _) => (
                    results.ratio_to_single(shape, subject, others),
                    |found, bound| found >= bound,
                    "times what the best other engine moves in single messages".to_owned(),
                ),
                Bound::TimesAsQuick(other, _) => (
                    results.compared(
                        shape,
                        subject,
                        *other,
                        |figure| figure.p50_us,
                        |own, theirs| theirs / own,
                    ),
                    |found, bound| found >= bound,
                    format!("times as quick as {other}, one at a time"),
                ),
                Bound::LaunchWithin(other, _) => (
                    results.compared(
                        shape,
                        subject,
                        *other,
                        |figure| figure.launch_p50_us,
                        |own, theirs| own - theirs,
                    ),
                    |found, bound| found < bound,
                    format!("us more in a call of launch than {other}"),
                ),
                Bound::Under(what, figure, _) => {
                    (results.spread(shape, subject, figure), |found, bound| found < bound, (*what).to_owned())
                }
            };
            let (bound, sign) = match target.bound {
                Bound::Times(_, bound)
                | Bound::TimesBest(_, bound)
                | Bound::TimesBestSingle(_, bound)
                | Bound::TimesAsQuick(_, bound) => (bound, ">="),
                Bound::LaunchWithin(_, bound) | Bound::Under(_, _, bound) => (bound, "<"),
            };
            let Some(found) = found else { continue };
            let met = met(found.median, bound);
            let word = if met { "met" } else { "MISSED" };
            let text = format!(
                "{word}: {subject}, {}: {sign} {bound} {what}: {:.2} ({:.2} to {:.2})",
                shape.title(),
                found.median,
                found.min,
                found.max
            );
            verdicts.push(Verdict { text, met });
        }
    }
    verdicts
}
