//! The table of cliques, which the reports of the service and the answers of RAS share. Begin at [`clique_row`].

use std::fmt::Display;

/// The heading of the table, as a line.
pub(super) const CLIQUE_HEADING: &str = "CLIQUE            RANKS  CALLED BY ALL     SPREAD  STATE\n";

/// Returns a row as a line. `known` is the number of ranks of which something is known, of `ranks`; they have called between
/// `back` and `front` collectives.
pub(super) fn clique_row(
    clique: &str,
    (known, ranks): (usize, u32),
    (back, front): (u64, u64),
    state: impl Display,
) -> String {
    let known = match known == ranks as usize {
        true => ranks.to_string(),
        false => format!("{known}/{ranks}"),
    };
    format!("{clique:<17} {known:<6} {back:<17} {:<7} {state}\n", front.saturating_sub(back))
}
