//! Escapes the value of every expression in every template: escapes HTML, and replaces hidden characters by their
//! codes.
//!
//! `askama.toml` makes this escaper the default, so a template can bypass it only with `|safe`. Hidden characters
//! are invisible or change the direction of writing. Line breaks and tabs are kept, because values contain them. A
//! value of type [`askama::filters::Safe`] is already HTML and is not escaped. Begin at [`HtmlEscaper`].

use std::fmt::{self, Write};

use askama::filters::{Escaper, Html};

use crate::text::escape_keeping_lines;

/// Escapes text for a page.
#[derive(Debug, Clone, Copy, Default)]
pub struct HtmlEscaper;

impl Escaper for HtmlEscaper {
    fn write_escaped_str<W: Write>(&self, page: W, text: &str) -> fmt::Result {
        Html.write_escaped_str(page, &escape_keeping_lines(text))
    }
}

#[cfg(test)]
mod tests {
    use askama::Template;

    use crate::text::is_hidden_character;

    #[derive(Template)]
    #[template(source = "<b title=\"{{ text }}\">{{ text }}{{ letter }}</b>", ext = "html")]
    struct EscapedTemplate<'a> {
        text: &'a str,
        letter: char,
    }

    #[test]
    fn no_expression_of_a_template_shows_a_hidden_character() {
        let text = "a<b>\u{202e}\u{200b}\u{1b}[31m\u{9b}\u{0}";
        let page = EscapedTemplate { text, letter: '\u{2066}' }.render().unwrap();
        assert!(!page.contains(is_hidden_character), "{page:?}");
        assert!(
            page.contains("&#60;b&#62;\\u{202e}\\u{200b}\\u{1b}[31m") && page.contains("\\u{2066}</b>"),
            "{page}"
        );
        assert!(EscapedTemplate { text: "a\n\tb", letter: 'ü' }.render().unwrap().contains("a\n\tbü</b>"));
    }
}
