//! Runs a script on both services and compares the results.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::expect::{Expected, Outcome, describe};
use crate::script::{Release, Script, ScriptCall, SideKind, Step, Version, observer};
use crate::service::ServiceUnderTest;
use crate::support::{Answer, Call};

/// The timeout of an answer that must come. The C++ service checks its timeouts once a second, and machines
/// are slow.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// The time for which a call that must wait is watched for an answer.
const WATCHED: Duration = Duration::from_millis(30);

/// The results of a script on one service.
pub struct Trace {
    /// The answers that must be the same on both services.
    common: Vec<(String, Answer)>,
    /// The deviations from the script.
    pub objections: Vec<String>,
    /// The last output of the service.
    said: String,
}

/// The services to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServicesUnderTest {
    Both,
    Only(SideKind),
}

/// Runs a script against a release's own service and against Muster.
///
/// # Errors
/// In words, if a service deviates from the script, or the services differ.
pub async fn compare(
    script: &Script,
    release: Release,
    environment: &Path,
    sides: ServicesUnderTest,
) -> Result<(), String> {
    let cxx = async {
        if sides == ServicesUnderTest::Only(SideKind::Muster) {
            return None;
        }
        let side = ServiceUnderTest::cxx(environment, release, &script.job);
        Some(run(script, side).await)
    };
    let muster = async {
        if sides == ServicesUnderTest::Only(SideKind::Cxx) {
            return None;
        }
        let side = ServiceUnderTest::muster(release, &script.job, script.heeds_connections);
        Some(run(script, side).await)
    };
    let (cxx, muster) = tokio::join!(cxx, muster);
    let mut found = Vec::new();
    for (name, trace) in [("jaxlib", &cxx), ("muster", &muster)] {
        let Some(trace) = trace else { continue };
        found.extend(trace.objections.iter().map(|why| format!("{name}: {why}")));
        if !trace.objections.is_empty() && !trace.said.is_empty() {
            found.push(format!("{name} said:\n{}", trace.said));
        }
    }
    if let (Some(cxx), Some(muster)) = (&cxx, &muster)
        && found.is_empty()
    {
        found.extend(disagreements(&cxx.common, &muster.common));
    }
    if found.is_empty() { Ok(()) } else { Err(found.join("\n")) }
}

fn disagreements(cxx: &[(String, Answer)], muster: &[(String, Answer)]) -> Vec<String> {
    assert_eq!(cxx.len(), muster.len(), "one script gives two traces of the same steps");
    let differing = cxx.iter().zip(muster).filter(|(theirs, ours)| theirs != ours);
    differing
        .map(|((what, theirs), (_, ours))| {
            let raw =
                |answer: &Answer| format!("{} raw payloads {:?}", describe(answer), answer.payloads.raw);
            format!("{what}: they differ.\n  jaxlib: {}\n  muster: {}", raw(theirs), raw(ours))
        })
        .collect()
}

/// Runs a script on one service.
pub async fn run(script: &Script, mut side: ServiceUnderTest) -> Trace {
    let mut trace = Trace { common: Vec::new(), objections: Vec::new(), said: String::new() };
    for step in &script.steps {
        match step {
            Step::Only { side: kind, steps, .. } if *kind == side.kind => {
                for step in steps {
                    perform(step, &mut side, &mut trace, false).await;
                }
            }
            Step::Only { .. } => {}
            step => perform(step, &mut side, &mut trace, true).await,
        }
        // Results after a deviation mean nothing.
        if !trace.objections.is_empty() {
            break;
        }
    }
    if trace.objections.is_empty() && script.compare_end {
        look_at_end(script, &mut side, &mut trace).await;
    }
    if !trace.objections.is_empty() {
        trace.said = side.said();
    }
    trace
}

/// Performs one step. Its result is compared if the other service takes the step too.
async fn perform(step: &Step, side: &mut ServiceUnderTest, trace: &mut Trace, both: bool) {
    match step {
        Step::Start { handle, who, ask } => side.start(handle, *who, ask).await,
        Step::HangUp { handle } => side.hang_up(handle).await,
        Step::Disconnect { who } => side.disconnect(*who).await,
        Step::Sleep(time) => tokio::time::sleep(*time).await,
        Step::Expect { handle, expected } => {
            let (outcome, same) = match (expected, side.kind) {
                (Expected::Same(outcome), _) => (outcome, both),
                (Expected::Differs { cxx, .. }, SideKind::Cxx) => (cxx, false),
                (Expected::Differs { muster, .. }, SideKind::Muster) => (muster, false),
            };
            let limit = if matches!(outcome, Outcome::Waits) { WATCHED } else { ANSWER_LIMIT };
            let answer = side.pending(handle).within(limit).await.map(|answer| side.tidied(answer));
            if let Some(why) = outcome.objection(side.generation, answer.as_ref()) {
                trace.objections.push(format!("{handle}: {why}"));
            }
            if let (true, Some(answer)) = (same, answer) {
                let answer = side.normalised(answer);
                trace.common.push((handle.clone(), answer));
            }
        }
        Step::Only { .. } => unreachable!("scripts do not nest what is for one side only"),
    }
}

/// Reads the states of the tasks, and every key and directory that the script wrote to.
async fn look_at_end(script: &Script, side: &mut ServiceUnderTest, trace: &mut Trace) {
    let mut keys = BTreeSet::new();
    for step in &script.steps {
        if let Step::Start { ask: ScriptCall::Call(call), .. } = step
            && let Call::Insert { key, .. } | Call::Increment { key, .. } | Call::Delete { key, .. } = call
        {
            keys.insert(key.clone());
        }
    }
    let directories: BTreeSet<String> =
        keys.iter().filter_map(|key| key.rsplit_once('/')).map(|(parent, _)| parent.to_owned()).collect();
    let mut looks: Vec<(String, ScriptCall)> =
        vec![("the states at the end".into(), ScriptCall::Watch(Version::None))];
    looks.extend(
        keys.iter().map(|key| (format!("the value of {key:?} at the end"), Call::try_get(key).into())),
    );
    looks.extend(
        directories.iter().map(|name| (format!("directory {name:?} at the end"), Call::list(name).into())),
    );
    for (what, ask) in looks {
        side.start(&what, observer(), &ask).await;
        match side.pending(&what).within(ANSWER_LIMIT).await {
            Some(answer) => {
                let answer = side.normalised(answer);
                trace.common.push((what, answer));
            }
            None => trace.objections.push(format!("{what}: no answer")),
        }
    }
}
