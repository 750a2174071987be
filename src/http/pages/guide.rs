//! Serves `GET /guide`: how to use Muster, what its terms mean, and what to do when something is wrong.
//!
//! The pages are Markdown in `web/guide`, except for two: the page of findings is made of the texts of the
//! findings, and that of the alerts of the texts of their rules.

use std::fmt::Write as _;

use askama::Template;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Redirect, Response};
use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use crate::findings::CATALOGUE;
use crate::http::{AppState, Problem};

/// A page of the guide: its name in addresses, its title, and its text.
type GuidePageSource = (&'static str, &'static str, fn() -> String);

/// All pages, in reading order.
static CHAPTERS: [GuidePageSource; 8] = [
    ("start", "Point JAX at Muster", || include_str!("../../../web/guide/start.md").to_owned()),
    ("troubleshooting", "Troubleshooting", || {
        include_str!("../../../web/guide/troubleshooting.md").to_owned()
    }),
    ("states", "What every state means", || include_str!("../../../web/guide/states.md").to_owned()),
    ("findings", "Findings", findings),
    ("alerts", "Alerts", || include_str!("../../../dashboards/alerts.md").to_owned()),
    ("operations", "Exclude, readmit, drain", || include_str!("../../../web/guide/operations.md").to_owned()),
    ("security", "Security", || include_str!("../../../web/guide/security.md").to_owned()),
    ("glossary", "Glossary", || include_str!("../../../web/guide/glossary.md").to_owned()),
];

/// The former and the present names of pages.
const RENAMED: [(&str, &str); 4] =
    [("night", "troubleshooting"), ("acting", "operations"), ("safe", "security"), ("words", "glossary")];

/// Returns the Markdown of the page of findings.
fn findings() -> String {
    let mut text = String::from(
        "# Findings\n\nMuster checks every job once a second. A *finding* names the tasks and the measurements that it rests \
         on. Pages show a finding only while it holds. A finding changes nothing by itself, and closes ten seconds \
         after it last held.\n",
    );
    for detector in CATALOGUE {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n## {} {{#{}}}\n\n`{}`, {}. {}\n\n**What to do.** {}\n",
            detector.title,
            detector.id,
            detector.id,
            detector.severity.name(),
            detector.means,
            detector.advice
        );
    }
    text
}

/// Returns the anchor of a heading.
fn anchor(heading: &str) -> String {
    let letters = heading.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let joined: String = letters.collect();
    joined.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// The sections of a page: anchors and headings.
type Sections = Vec<(String, String)>;

/// Returns Markdown as HTML, with an anchor at every heading, and the sections.
fn rendered(markdown: &str) -> (String, Sections) {
    let options = Options::ENABLE_TABLES | Options::ENABLE_HEADING_ATTRIBUTES;
    let mut events: Vec<Event<'_>> = Parser::new_ext(markdown, options).collect();
    let mut sections = Vec::new();
    for at in 0..events.len() {
        let Event::Start(Tag::Heading { level, id, .. }) = &events[at] else { continue };
        let words = events[at + 1..].iter().take_while(|one| !matches!(one, Event::End(TagEnd::Heading(_))));
        let text: String = words
            .filter_map(|one| match one {
                Event::Text(text) | Event::Code(text) => Some(text.as_ref()),
                _ => None,
            })
            .collect();
        let name = id.as_ref().map_or_else(|| anchor(&text), ToString::to_string);
        if *level == HeadingLevel::H2 {
            sections.push((name.clone(), text));
        }
        if let Event::Start(Tag::Heading { id, .. }) = &mut events[at] {
            *id = Some(name.into());
        }
    }
    let mut html = String::new();
    pulldown_cmark::html::push_html(&mut html, events.into_iter());
    // Wide tables and code scroll on their own, also by keyboard.
    let html = html.replace("<pre>", "<pre tabindex=\"0\">");
    (
        html.replace(
            "<table>",
            "<div class=\"wide\" tabindex=\"0\" role=\"group\" aria-label=\"table\"><table>",
        )
        .replace("</table>", "</table></div>"),
        sections,
    )
}

#[derive(Template)]
#[template(path = "guide.html")]
struct GuidePage {
    page: PageFrame,
    chapters: &'static [GuidePageSource],
    chapter: &'static str,
    sections: Sections,
    html: String,
}

impl GuidePage {
    fn is_at(&self, name: &str) -> bool {
        self.chapter == name
    }
}

/// Serves `GET /guide`.
pub(super) async fn first() -> Redirect {
    Redirect::to("/guide/start")
}

/// Serves `GET /guide/{page}`.
pub(super) async fn show(
    State(site): State<AppState>,
    user: PageUser,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    if let Some((_, now)) = RENAMED.iter().find(|(before, _)| *before == name) {
        return Ok(Redirect::permanent(&format!("/guide/{now}")).into_response());
    }
    let chapter = CHAPTERS.iter().find(|(chapter, ..)| *chapter == name);
    let missing = || Problem::not_found("no-such-page", format!("the guide has no page {name:?}"));
    let (chapter, title, text) = chapter.ok_or_else(missing)?;
    let (html, sections) = rendered(&text());
    let now = site.engine.clock().now();
    let page = PageFrame::new(user, NavEntry::Guide, format!("{title} · Guide"), now);
    render_page(&GuidePage { page, chapters: &CHAPTERS, chapter, sections, html }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alert_that_a_rule_names_has_its_anchor() {
        let rules = include_str!("../../../dashboards/rules/alerts.yml");
        let (html, _) = rendered(include_str!("../../../dashboards/alerts.md"));
        let mut found = 0;
        for name in rules.split("/guide/alerts#").skip(1) {
            let name: String = name.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            assert!(html.contains(&format!("id=\"{name}\"")), "the guide does not explain {name}");
            found += 1;
        }
        assert!(found > 10, "{found} alerts");
    }

    #[test]
    fn every_link_within_the_guide_leads_somewhere() {
        let pages: Vec<(&str, String)> =
            CHAPTERS.iter().map(|(name, _, text)| (*name, rendered(&text()).0)).collect();
        for (from, html) in &pages {
            for link in html.split("href=\"/guide/").skip(1) {
                let link = link.split('"').next().unwrap_or_default();
                let (name, anchor) = link.split_once('#').unwrap_or((link, ""));
                let page = pages.iter().find(|(page, _)| *page == name);
                let (_, there) = page.unwrap_or_else(|| panic!("{from} leads to {link}"));
                assert!(
                    anchor.is_empty() || there.contains(&format!("id=\"{anchor}\"")),
                    "{from} leads to {link}"
                );
            }
        }
    }
}
