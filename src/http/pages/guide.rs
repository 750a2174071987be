//! Serves the guide (`GET /guide`): how to run programs with Muster, how to operate jobs, and what the terms mean.
//!
//! Most pages are Markdown files in `web/guide`. The page of findings is built from the texts of the detectors. The
//! page of alerts is `dashboards/alerts.md`. Begin at `show_guide_page`, then `CHAPTERS`.

use std::fmt::Write as _;

use askama::Template;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Redirect, Response};
use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use super::assets::Asset;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use crate::http::{AppState, Problem};
use crate::service::findings::CATALOGUE;

/// A page of the guide: its name in addresses, its title, and its text.
type GuidePageSource = (&'static str, &'static str, fn() -> String);

/// Returns the text of a page that is a file of `web/guide`.
macro_rules! markdown {
    ($name:literal) => {
        || include_str!(concat!("../../../web/guide/", $name, ".md")).to_owned()
    };
}

/// All pages, in reading order, by the reader's task.
static CHAPTERS: [(&str, &[GuidePageSource]); 3] = [
    (
        "Run and write programs",
        &[
            ("start", "Point JAX at Muster", markdown!("start")),
            ("arrays", "Arrays across processes", markdown!("arrays")),
            ("data", "Load data by process", markdown!("data")),
            ("live", "Live devices", markdown!("live")),
            ("preemption", "Save on preemption", markdown!("preemption")),
            ("resharding", "Reshard a running job", markdown!("resharding")),
            ("platforms", "CPU, GPU and TPU", markdown!("platforms")),
            ("languages", "Rust, C, C++ and Python", markdown!("languages")),
        ],
    ),
    (
        "Operate jobs",
        &[
            ("pages", "Use the pages", markdown!("pages")),
            ("troubleshooting", "Troubleshooting", markdown!("troubleshooting")),
            ("sick-host", "Find the sick host", markdown!("sick-host")),
            ("stacks", "See what tasks are doing", markdown!("stacks")),
            ("collectives", "See which task holds up a collective", markdown!("collectives")),
            ("findings", "Findings", findings_markdown),
            ("alerts", "Alerts", || include_str!("../../../dashboards/alerts.md").to_owned()),
            ("operations", "Exclude, readmit, drain", markdown!("operations")),
            ("restarts", "Restart the service", markdown!("restarts")),
            ("security", "Security", markdown!("security")),
        ],
    ),
    (
        "Look up",
        &[
            ("states", "What every state means", markdown!("states")),
            ("glossary", "Glossary", markdown!("glossary")),
        ],
    ),
];

/// Returns all pages, in reading order.
fn all_guide_pages() -> impl Iterator<Item = &'static GuidePageSource> {
    CHAPTERS.iter().flat_map(|(_, pages)| *pages)
}

/// The former and the present names of pages.
const RENAMED: [(&str, &str); 4] =
    [("night", "troubleshooting"), ("acting", "operations"), ("safe", "security"), ("words", "glossary")];

/// Returns the Markdown of the page of findings.
fn findings_markdown() -> String {
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
fn heading_anchor(heading: &str) -> String {
    let letters = heading.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let joined: String = letters.collect();
    joined.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// Gives a picture that is a static file the address of its present content, which browsers keep.
fn address_picture(mut event: Event<'_>) -> Event<'_> {
    if let Event::Start(Tag::Image { dest_url, .. }) = &mut event
        && let Some(name) = dest_url.strip_prefix("/static/")
    {
        *dest_url = Asset::url_path(name).into();
    }
    event
}

/// The sections of a page: anchors and headings.
type GuideSections = Vec<(String, String)>;

/// Returns Markdown as HTML, with an anchor at every heading, and the sections.
fn render_markdown(markdown: &str) -> (String, GuideSections) {
    let options = Options::ENABLE_TABLES | Options::ENABLE_HEADING_ATTRIBUTES;
    let mut events: Vec<Event<'_>> = Parser::new_ext(markdown, options).map(address_picture).collect();
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
        let name = id.as_ref().map_or_else(|| heading_anchor(&text), ToString::to_string);
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
struct GuidePageTemplate {
    page: PageFrame,
    chapters: &'static [(&'static str, &'static [GuidePageSource])],
    name: &'static str,
    sections: GuideSections,
    html: String,
}

impl GuidePageTemplate {
    fn is_current(&self, name: &str) -> bool {
        self.name == name
    }
}

/// Serves `GET /guide`.
pub(super) async fn redirect_to_first_page() -> Redirect {
    Redirect::to("/guide/start")
}

/// Serves `GET /guide/{page}`.
pub(super) async fn show_guide_page(
    State(site): State<AppState>,
    user: PageUser,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    if let Some((_, now)) = RENAMED.iter().find(|(before, _)| *before == name) {
        return Ok(Redirect::permanent(&format!("/guide/{now}")).into_response());
    }
    let missing = || Problem::not_found("no-such-page", format!("the guide has no page {name:?}"));
    let (name, title, text) = all_guide_pages().find(|(page, ..)| *page == name).ok_or_else(missing)?;
    let (html, sections) = render_markdown(&text());
    let now = site.engine.clock().now();
    let page = PageFrame::new(user, NavEntry::Guide, format!("{title} · Guide"), now);
    render_page(&GuidePageTemplate { page, chapters: &CHAPTERS, name, sections, html }, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alert_that_a_rule_names_has_its_anchor() {
        let rules = include_str!("../../../dashboards/rules/alerts.yml");
        let (html, _) = render_markdown(include_str!("../../../dashboards/alerts.md"));
        let mut found = 0;
        for name in rules.split("/guide/alerts#").skip(1) {
            let name: String = name.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            assert!(html.contains(&format!("id=\"{name}\"")), "the guide does not explain {name}");
            found += 1;
        }
        assert!(found > 10, "{found} alerts");
    }

    /// Returns the values of an attribute in HTML.
    fn attribute_values<'h>(html: &'h str, name: &str) -> Vec<&'h str> {
        let start = format!(" {name}=\"");
        let values = html.split(&start).skip(1);
        values.map(|rest| rest.split('"').next().unwrap_or_default()).collect()
    }

    #[test]
    fn every_link_within_the_guide_leads_somewhere() {
        let pages: Vec<(&str, String)> =
            all_guide_pages().map(|(name, _, text)| (*name, render_markdown(&text()).0)).collect();
        let mut found = 0;
        for (from, html) in &pages {
            for link in attribute_values(html, "href") {
                let own = link.strip_prefix('#').map(|anchor| (*from, anchor));
                let other =
                    || link.strip_prefix("/guide/").map(|rest| rest.split_once('#').unwrap_or((rest, "")));
                let Some((name, anchor)) = own.or_else(other) else { continue };
                let page = pages.iter().find(|(page, _)| *page == name);
                let (_, there) = page.unwrap_or_else(|| panic!("{from} leads to {link}"));
                assert!(
                    anchor.is_empty() || attribute_values(there, "id").contains(&anchor),
                    "{from} leads to {link}"
                );
                found += 1;
            }
        }
        assert!(found > 30, "{found} links");
    }

    #[test]
    fn every_picture_of_the_guide_is_a_small_file_and_is_described() {
        let mut found = 0;
        for (name, _, text) in all_guide_pages() {
            let (html, _) = render_markdown(&text());
            let alternatives = attribute_values(&html, "alt");
            for (place, source) in attribute_values(&html, "src").into_iter().enumerate() {
                let file = source.strip_prefix("/static/").and_then(|rest| rest.split_once("?v="));
                let (file, digest) = file.unwrap_or_else(|| panic!("{name} shows {source}"));
                assert!(!digest.is_empty(), "{name} shows {file}, which does not exist");
                let bytes = Asset::find(file).expect("it has a digest").data.len();
                assert!(bytes < 150_000, "{file} has {bytes} bytes");
                assert!(alternatives.get(place).is_some_and(|text| text.len() > 20), "{file} in {name}");
                found += 1;
            }
        }
        assert!(found > 0);
    }

    #[test]
    fn every_page_has_a_title_and_an_anchor_of_its_own_at_every_section() {
        for (name, _, text) in all_guide_pages() {
            let (html, sections) = render_markdown(&text());
            assert_eq!(html.matches("<h1").count(), 1, "{name}");
            let ids = attribute_values(&html, "id");
            let unique: std::collections::BTreeSet<&str> = ids.iter().copied().collect();
            assert_eq!(unique.len(), ids.len(), "two sections of {name} have one anchor: {ids:?}");
            for (anchor, heading) in sections {
                assert!(
                    !anchor.is_empty() && ids.contains(&&*anchor),
                    "{heading} of {name} has the anchor {anchor:?}"
                );
            }
        }
    }

    /// Returns the text that readers see outside of code.
    fn text_outside_of_code(markdown: &str) -> String {
        let (html, _) = render_markdown(markdown);
        let outside = html.split("<code").enumerate().map(|(at, part)| match at {
            0 => part,
            _ => part.split_once("</code>").map_or(part, |(_, after)| after),
        });
        let tags_removed = outside.flat_map(|part| part.split('<').enumerate()).map(|(at, part)| match at {
            0 => part,
            _ => part.split_once('>').map_or(part, |(_, after)| after),
        });
        tags_removed.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn no_markdown_is_left_in_a_page() {
        let marks = ["](", "**", "``", "{#", "| ---", "\n#", "\n- "];
        let raw = |text: &str| marks.into_iter().find(|mark| text.contains(mark));
        // The renderer leaves marks that it does not know as they are; this finds them.
        assert_eq!(raw(&text_outside_of_code("# Title\n\nsee **this\n")), Some("**"));
        assert_eq!(raw(&text_outside_of_code("# Title\n\n| a | b |\n| --- |\n")), Some("| ---"));
        for (name, _, text) in all_guide_pages() {
            let text = text_outside_of_code(&text());
            assert_eq!(raw(&text), None, "{name}: {text}");
        }
    }
}
