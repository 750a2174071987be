//! Escapes every expression of every template: HTML, and hidden characters spelled out.
//!
//! `askama.toml` names it, so a template can bypass it only with `|safe`. Characters that change the
//! direction of writing, and characters that are invisible, are shown by their code. Line breaks and tabs
//! stay, because values contain them. A value of type [`askama::filters::Safe`] is HTML already.

use std::fmt::{self, Write};

use askama::filters::{Escaper, Html};

use crate::text::many_lines;

/// Escapes text for a page.
#[derive(Debug, Clone, Copy, Default)]
pub struct Escape;

impl Escaper for Escape {
    fn write_escaped_str<W: Write>(&self, page: W, text: &str) -> fmt::Result {
        Html.write_escaped_str(page, &many_lines(text))
    }
}

#[cfg(test)]
mod tests {
    use askama::Template;

    use crate::text::is_hidden;

    #[derive(Template)]
    #[template(source = "<b title=\"{{ text }}\">{{ text }}{{ letter }}</b>", ext = "html")]
    struct Shown<'a> {
        text: &'a str,
        letter: char,
    }

    #[test]
    fn no_expression_of_a_template_shows_a_hidden_character() {
        let text = "a<b>\u{202e}\u{200b}\u{1b}[31m\u{9b}\u{0}";
        let page = Shown { text, letter: '\u{2066}' }.render().unwrap();
        assert!(!page.contains(is_hidden), "{page:?}");
        assert!(
            page.contains("&#60;b&#62;\\u{202e}\\u{200b}\\u{1b}[31m") && page.contains("\\u{2066}</b>"),
            "{page}"
        );
        assert!(Shown { text: "a\n\tb", letter: 'ü' }.render().unwrap().contains("a\n\tbü</b>"));
    }
}
