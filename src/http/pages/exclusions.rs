//! Renders exclusions and their preview, and handles the forms.
//!
//! `http/exclusions.rs` carries out the requests of the forms. Begin at `show_exclusions_page`, then
//! `submit_exclude_form`.

use askama::Template;
use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page_with_status};
use super::job_head::render_head_fragment;
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::{links, status, times};
use crate::coordination::{
    CommandReason, ExclusionEndKind, ExclusionId, ExclusionPreview, ExclusionTarget, ExclusionView, JobName,
    TaskId,
};
use crate::http::api::NewExclusion;
use crate::http::extractors::{FormBody, ItemInJobPath, JobPath, QueryParams};
use crate::http::{AppState, Problem, exclusions};
use crate::service::ActorContext;

/// The fields of the exclusion form.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct ExcludeForm {
    pub task: String,
    pub host: String,
    pub reason: String,
    /// The duration in seconds; empty for no expiry.
    pub expires: String,
    /// Set if the exclusion may end the run.
    pub end_run: String,
    /// Set if the user has seen the preview.
    pub seen: String,
}

/// The durations that the form offers.
const LASTING: [(&str, &str); 6] = [
    ("", "no expiry"),
    ("3600", "1 hour"),
    ("14400", "4 hours"),
    ("86400", "1 day"),
    ("604800", "1 week"),
    ("2592000", "30 days"),
];

impl ExcludeForm {
    pub fn duration_choices(&self) -> &'static [(&'static str, &'static str)] {
        &LASTING
    }

    /// Returns the duration in words.
    pub fn duration_text(&self) -> String {
        let known = LASTING.iter().find(|(seconds, _)| *seconds == self.expires);
        known
            .filter(|(seconds, _)| !seconds.is_empty())
            .map_or_else(|| "until an operator readmits".to_owned(), |(_, words)| format!("for {words}"))
    }

    fn to_new_exclusion(&self) -> Result<NewExclusion, String> {
        let number = |text: &str| text.trim().parse::<i32>();
        let task = match self.task.trim() {
            "" => None,
            text => Some(number(text).map_err(|_| format!("{text:?} is not a task number"))?),
        };
        let host = Some(self.host.trim().to_owned()).filter(|host| !host.is_empty());
        if task.is_none() && host.is_none() {
            return Err("enter a task number or a host".into());
        }
        let expires_in_seconds = match self.expires.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?),
        };
        let reason = CommandReason::try_from(self.reason.clone()).map_err(|error| error.to_string())?;
        let end_run = !self.end_run.is_empty();
        Ok(NewExclusion { task, host, reason, expires_in_seconds, end_run, dry_run: self.seen.is_empty() })
    }
}

/// The last action, which the address carries after the redirect.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct CompletedActionQuery {
    did: String,
    number: String,
    /// The host with which the form is filled in.
    host: String,
}

impl CompletedActionQuery {
    /// Returns the last action as a sentence.
    pub fn completed_action_message(&self) -> Option<String> {
        let number = ExclusionId(self.number.parse().unwrap_or_default());
        Some(match self.did.as_str() {
            "excluded" => {
                format!("Exclusion {number} is in force. The other tasks continue without the excluded ones.")
            }
            "lifted" => {
                format!("Exclusion {number} is lifted. Restart the process to have it register.")
            }
            "drained" => "Drain requested. Tasks acknowledge it at their next step.".into(),
            _ => return None,
        })
    }
}

#[derive(Template)]
#[template(path = "parts/exclusions.html")]
struct ExclusionListFragment<'a> {
    job: &'a JobName,
    exclusions: Vec<ExclusionView>,
    over: Vec<ExclusionView>,
    user: &'a PageUser,
}

/// Returns the fragments of the page for this user.
pub(super) fn render_fragments(
    site: &AppState,
    snapshot: &JobSnapshot,
    user: &PageUser,
) -> Result<Vec<Fragment>, Problem> {
    let all =
        site.engine.read(|core, _| core.job(snapshot.id).map(|job| job.exclusions())).unwrap_or_default();
    let (exclusions, over) = all.into_iter().partition(|exclusion| exclusion.ended.is_none());
    let list = ExclusionListFragment { job: &snapshot.view.name, exclusions, over, user };
    Ok(vec![render_head_fragment(snapshot)?, Fragment::new("exclusions", &list)?])
}

#[derive(Template)]
#[template(path = "exclusions.html")]
struct ExclusionsPageTemplate<'a> {
    page: PageFrame,
    user: PageUser,
    job: &'a JobName,
    form: ExcludeForm,
}

#[derive(Template)]
#[template(path = "exclude.html")]
struct ConfirmExclusionPageTemplate {
    page: PageFrame,
    job: JobName,
    form: ExcludeForm,
    target: ExclusionTarget,
    preview: ExclusionPreview,
    back: String,
}

/// Returns the page, with the last action or with the error of the form.
fn render_exclusions_page(
    site: &AppState,
    job: &JobPath,
    user: PageUser,
    did: &CompletedActionQuery,
    form: ExcludeForm,
    error: Option<(u16, String)>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(site, job)?;
    let (title, parts) = (format!("Exclusions of {}", job.name), render_fragments(site, &snapshot, &user)?);
    let page = PageFrame::for_job_snapshot(
        user.clone(),
        NavEntry::Exclusions,
        title,
        &snapshot,
        &LivePage::Exclusions,
        parts,
    )
    .with_notice(did.completed_action_message())
    .with_error(error);
    render_page_with_status(
        page.response_status(),
        &ExclusionsPageTemplate { page, user, job: &job.name, form },
        snapshot.captured_at(),
    )
}

/// Serves `GET /jobs/{job}/exclusions`.
pub(super) async fn show_exclusions_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(did): QueryParams<CompletedActionQuery>,
) -> Result<Response, Problem> {
    let form = ExcludeForm { host: did.host.clone(), ..ExcludeForm::default() };
    render_exclusions_page(&site, &job, user, &did, form, None)
}

/// Serves `POST /jobs/{job}/exclusions`: the first request shows the preview, the second one excludes.
pub(super) async fn submit_exclude_form(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    Extension(author): Extension<ActorContext>,
    FormBody(form): FormBody<ExcludeForm>,
) -> Result<Response, Problem> {
    let new = match form.to_new_exclusion() {
        Ok(new) => new,
        Err(wrong) => {
            return render_exclusions_page(
                &site,
                &job,
                user,
                &CompletedActionQuery::default(),
                form,
                Some((422, wrong)),
            );
        }
    };
    let task = new.task;
    let preview = match exclusions::preview_exclusion(&site, &job, &author, &new) {
        Ok(preview) => preview,
        Err(problem) => {
            let wrong = (problem.status, problem.detail.into());
            return render_exclusions_page(
                &site,
                &job,
                user,
                &CompletedActionQuery::default(),
                form,
                Some(wrong),
            );
        }
    };
    let wrong = if new.dry_run {
        None
    } else {
        match exclusions::perform_exclusion(&site, &job, &author, new) {
            Ok(view) => {
                let place = match task {
                    Some(task) => links::task_page_path(&job.name, &TaskId(task)),
                    None => format!("/jobs/{}/exclusions", job.name),
                };
                return Ok(Redirect::to(&format!("{place}?did=excluded&number={}", view.id)).into_response());
            }
            Err(problem) => Some((problem.status, problem.detail.into_string())),
        }
    };
    render_exclusion_confirmation_page(&site, &job, user, form, task, preview, wrong)
}

fn render_exclusion_confirmation_page(
    site: &AppState,
    job: &JobPath,
    user: PageUser,
    form: ExcludeForm,
    task: Option<i32>,
    preview: ExclusionPreview,
    wrong: Option<(u16, String)>,
) -> Result<Response, Problem> {
    let target = match task {
        Some(task) => ExclusionTarget::Task(TaskId(task)),
        None => exclusions::resolve_host(site, job, form.host.trim())?,
    };
    let back = match task {
        Some(task) => links::task_page_path(&job.name, &TaskId(task)),
        None => format!("/jobs/{}/exclusions", job.name),
    };
    let now = site.engine.clock().now();
    let title = format!("Exclude {target} of {}?", job.name);
    let page = PageFrame::new(user, NavEntry::Exclusions, title, now).with_job(&job.name).with_error(wrong);
    render_page_with_status(
        page.response_status(),
        &ConfirmExclusionPageTemplate { page, job: job.name.clone(), form, target, preview, back },
        now,
    )
}

/// The fields of the form that lifts an exclusion.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LiftForm {
    reason: String,
    /// The task whose page has the form.
    task: String,
}

/// Serves `POST /jobs/{job}/exclusions/{id}/lift`.
pub(super) async fn submit_lift_form(
    State(site): State<AppState>,
    job: JobPath,
    ItemInJobPath(id): ItemInJobPath<u64>,
    user: PageUser,
    Extension(author): Extension<ActorContext>,
    FormBody(lifting): FormBody<LiftForm>,
) -> Result<Response, Problem> {
    let id = ExclusionId(id);
    let done = match CommandReason::try_from(lifting.reason) {
        Ok(reason) => exclusions::lift_and_audit_exclusion(&site, &job, id, &author, reason)
            .map_err(|problem| (problem.status, problem.detail.into_string())),
        Err(error) => Err((422, error.to_string())),
    };
    match done {
        Ok(_) => {
            let place = match lifting.task.parse() {
                Ok(task) => links::task_page_path(&job.name, &TaskId(task)),
                Err(_) => format!("/jobs/{}/exclusions", job.name),
            };
            Ok(Redirect::to(&format!("{place}?did=lifted&number={id}")).into_response())
        }
        Err(wrong) => render_exclusions_page(
            &site,
            &job,
            user,
            &CompletedActionQuery::default(),
            ExcludeForm::default(),
            Some(wrong),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_says_what_it_lacks() {
        let wrong = |form: ExcludeForm| form.to_new_exclusion().unwrap_err();
        assert!(wrong(ExcludeForm::default()).contains("task number or a host"));
        let form = ExcludeForm { task: "3".into(), ..ExcludeForm::default() };
        assert!(wrong(form.clone()).contains("reason"));
        assert!(wrong(ExcludeForm { task: "x".into(), ..form.clone() }).contains("not a task number"));
        let new = ExcludeForm { reason: "bad fan".into(), expires: "3600".into(), seen: "1".into(), ..form }
            .to_new_exclusion();
        let new = new.expect("it says all");
        assert_eq!(
            (new.task, new.expires_in_seconds, new.dry_run, new.end_run),
            (Some(3), Some(3600), false, false)
        );
    }
}
