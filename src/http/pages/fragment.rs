//! A fragment of a page: a piece of HTML with an id and a digest of its content. A live update sends a fragment as a
//! whole, or as a patch.
//!
//! `fragment_patch.rs` compares fragments. Begin at [`Fragment`].

use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};

use askama::Template;
use askama::filters::Safe;

use crate::http::Problem;

/// A piece of a page, which live updates replace as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fragment {
    pub id: &'static str,
    /// The HTML, in which relative times are not filled in yet.
    pub html: String,
    pub digest: u64,
}

impl Fragment {
    pub fn new(id: &'static str, template: &impl Template) -> Result<Self, Problem> {
        let html = template.render().map_err(|error| {
            tracing::error!(%error, part = id, "a part of a page cannot be rendered");
            Problem::internal_error()
        })?;
        let mut hasher = DefaultHasher::new();
        hasher.write(html.as_bytes());
        Ok(Self { id, html, digest: hasher.finish() })
    }

    /// Returns a fragment without content.
    pub fn empty(id: &'static str) -> Self {
        Self { id, html: String::new(), digest: DefaultHasher::new().finish() }
    }

    /// Returns the digest as text, for pages and addresses.
    pub fn digest_text(&self) -> String {
        format!("{:016x}", self.digest)
    }
}

/// The fragments of one page.
#[derive(Debug, Default)]
pub(super) struct FragmentSet(pub Vec<Fragment>);

impl FragmentSet {
    /// Returns the fragment of that name inside its frame; nothing if the page has no such fragment.
    pub fn framed(&self, id: &str) -> Safe<FramedFragment<'_>> {
        Safe(FramedFragment(self.0.iter().find(|part| part.id == id)))
    }
}

/// A fragment inside the element that live updates replace.
pub(super) struct FramedFragment<'a>(Option<&'a Fragment>);

impl fmt::Display for FramedFragment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(part) => {
                write!(
                    f,
                    "<div class=\"part\" id=\"{}\" data-tag=\"{}\">{}</div>",
                    part.id,
                    part.digest_text(),
                    part.html
                )
            }
            None => Ok(()),
        }
    }
}
