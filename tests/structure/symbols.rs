//! Every symbol that a template names is in the sprite.

use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_symbol_of_a_template_is_in_the_sprite() {
    let templates = Path::new(env!("CARGO_MANIFEST_DIR")).join("web/templates");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let between = |text: &str, start: &str| -> BTreeSet<String> {
        let rests = text.split(start).skip(1);
        rests.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
    };
    let defined = between(&read(&templates.join("sprite.html")), "id=\"");
    assert!(defined.len() > 20, "{defined:?}");
    let mut used = 0;
    for folder in [templates.clone(), templates.join("parts")] {
        for file in
            std::fs::read_dir(folder).unwrap().filter_map(Result::ok).filter(|file| file.path().is_file())
        {
            // A name that the program completes is not compared.
            for symbol in
                between(&read(&file.path()), "href=\"#g-").iter().filter(|name| !name.contains("{{"))
            {
                used += 1;
                assert!(defined.contains(&format!("g-{symbol}")), "{:?} names g-{symbol}", file.path());
            }
        }
    }
    assert!(used > 10, "{used}");
}
