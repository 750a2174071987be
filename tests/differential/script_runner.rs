//! Runs a script on both services and compares the results.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::expect::{Expected, ExpectedOutcome, describe_answer};
use crate::script::{Release, Script, ScriptCall, ScriptStep, ServiceKind, TaskStatesVersion, observer};
use crate::service::ServiceUnderTest;
use crate::support::{Answer, Call};

/// The timeout of an answer that must come. The C++ service checks its timeouts once a second, and machines
/// are slow.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// The time for which a call that must wait is watched for an answer.
const WATCHED: Duration = Duration::from_millis(30);

/// The results of a script on one service.
pub struct ScriptTrace {
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
    Only(ServiceKind),
}

/// Runs a script against a release's own service and against Muster.
///
/// # Errors
/// In words, if a service deviates from the script, or the services differ.
pub async fn compare_services(
    script: &Script,
    release: Release,
    environment: &Path,
    sides: ServicesUnderTest,
) -> Result<(), String> {
    let cxx = async {
        if sides == ServicesUnderTest::Only(ServiceKind::Muster) {
            return None;
        }
        let side = ServiceUnderTest::cxx(environment, release, &script.job);
        Some(run_script(script, side).await)
    };
    let muster = async {
        if sides == ServicesUnderTest::Only(ServiceKind::Cxx) {
            return None;
        }
        let side = ServiceUnderTest::muster(release, &script.job, script.heeds_connections);
        Some(run_script(script, side).await)
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
        found.extend(describe_differing_answers(&cxx.common, &muster.common));
    }
    if found.is_empty() { Ok(()) } else { Err(found.join("\n")) }
}

fn describe_differing_answers(cxx: &[(String, Answer)], muster: &[(String, Answer)]) -> Vec<String> {
    assert_eq!(cxx.len(), muster.len(), "one script gives two traces of the same steps");
    let differing = cxx.iter().zip(muster).filter(|(theirs, ours)| theirs != ours);
    differing
        .map(|((what, theirs), (_, ours))| {
            let raw = |answer: &Answer| {
                format!("{} raw payloads {:?}", describe_answer(answer), answer.payloads.raw)
            };
            format!("{what}: they differ.\n  jaxlib: {}\n  muster: {}", raw(theirs), raw(ours))
        })
        .collect()
}

/// Runs a script on one service.
pub async fn run_script(script: &Script, mut side: ServiceUnderTest) -> ScriptTrace {
    let mut trace = ScriptTrace { common: Vec::new(), objections: Vec::new(), said: String::new() };
    for step in &script.steps {
        match step {
            ScriptStep::Only { side: kind, steps, .. } if *kind == side.kind => {
                for step in steps {
                    perform_step(step, &mut side, &mut trace, false).await;
                }
            }
            ScriptStep::Only { .. } => {}
            step => perform_step(step, &mut side, &mut trace, true).await,
        }
        // Results after a deviation mean nothing.
        if !trace.objections.is_empty() {
            break;
        }
    }
    if trace.objections.is_empty() && script.compare_end {
        read_final_state(script, &mut side, &mut trace).await;
    }
    if !trace.objections.is_empty() {
        trace.said = side.printed_lines();
    }
    trace
}

/// Performs one step. Its result is compared if the other service takes the step too.
async fn perform_step(step: &ScriptStep, side: &mut ServiceUnderTest, trace: &mut ScriptTrace, both: bool) {
    match step {
        ScriptStep::Start { handle, who, ask } => side.start_call(handle, *who, ask).await,
        ScriptStep::HangUp { handle } => side.hang_up(handle).await,
        ScriptStep::Disconnect { who } => side.disconnect(*who).await,
        ScriptStep::Sleep(time) => tokio::time::sleep(*time).await,
        ScriptStep::Expect { handle, expected } => {
            let (outcome, same) = match (expected, side.kind) {
                (Expected::Same(outcome), _) => (outcome, both),
                (Expected::Differs { cxx, .. }, ServiceKind::Cxx) => (cxx, false),
                (Expected::Differs { muster, .. }, ServiceKind::Muster) => (muster, false),
            };
            let limit = if matches!(outcome, ExpectedOutcome::Waits) { WATCHED } else { ANSWER_LIMIT };
            let answer = side
                .pending_call(handle)
                .within(limit)
                .await
                .map(|answer| side.without_defects_of_cxx_service(answer));
            if let Some(why) = outcome.mismatch_text(side.generation, answer.as_ref()) {
                trace.objections.push(format!("{handle}: {why}"));
            }
            if let (true, Some(answer)) = (same, answer) {
                let answer = side.without_random_parts(answer);
                trace.common.push((handle.clone(), answer));
            }
        }
        ScriptStep::Only { .. } => unreachable!("scripts do not nest what is for one side only"),
    }
}

/// Reads the states of the tasks, and every key and directory that the script wrote to.
async fn read_final_state(script: &Script, side: &mut ServiceUnderTest, trace: &mut ScriptTrace) {
    let mut keys = BTreeSet::new();
    for step in &script.steps {
        if let ScriptStep::Start { ask: ScriptCall::Call(call), .. } = step
            && let Call::Insert { key, .. } | Call::Increment { key, .. } | Call::Delete { key, .. } = call
        {
            keys.insert(key.clone());
        }
    }
    let directories: BTreeSet<String> =
        keys.iter().filter_map(|key| key.rsplit_once('/')).map(|(parent, _)| parent.to_owned()).collect();
    let mut looks: Vec<(String, ScriptCall)> =
        vec![("the states at the end".into(), ScriptCall::Watch(TaskStatesVersion::None))];
    looks.extend(
        keys.iter().map(|key| (format!("the value of {key:?} at the end"), Call::try_get(key).into())),
    );
    looks.extend(
        directories.iter().map(|name| (format!("directory {name:?} at the end"), Call::list(name).into())),
    );
    for (what, ask) in looks {
        side.start_call(&what, observer(), &ask).await;
        match side.pending_call(&what).within(ANSWER_LIMIT).await {
            Some(answer) => {
                let answer = side.without_random_parts(answer);
                trace.common.push((what, answer));
            }
            None => trace.objections.push(format!("{what}: no answer")),
        }
    }
}
