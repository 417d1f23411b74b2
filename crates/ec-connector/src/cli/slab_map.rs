//! A slab drawn for a person: one character a cell, the state that covers most of a cell wins.

use std::fmt::Write;

use ec_connector::{MapRun, MapState};

use super::size::show_size;

/// How a state is drawn and explained.
struct Look {
    letter: char,
    name: &'static str,
    meaning: &'static str,
    /// An ANSI colour; the basic eight are readable on dark and light backgrounds.
    colour: &'static str,
    /// Explained even when nothing is in that state.
    usual: bool,
}

/// States in the order of the legend. Of two that cover equally much of a cell, the later one shows.
const STATES: [MapState; 10] = [
    MapState::Free,
    MapState::Resident,
    MapState::Leased,
    MapState::Ready,
    MapState::Writing,
    MapState::Waiting,
    MapState::Claimed,
    MapState::Owned,
    MapState::Stuck,
    MapState::Quarantined,
];

fn look(state: MapState) -> Look {
    let (letter, name, meaning, colour, usual) = match state {
        MapState::Free => ('.', "free", "nobody's", "\x1b[2m", true),
        MapState::Resident => (
            '#',
            "resident",
            "cached, makes room when needed",
            "\x1b[32m",
            true,
        ),
        MapState::Leased => ('L', "leased", "in use, stays where it is", "\x1b[35m", true),
        MapState::Ready => ('r', "ready", "complete, not taken yet", "\x1b[36m", true),
        MapState::Writing => ('w', "writing", "reserved for a producer", "\x1b[33m", true),
        MapState::Waiting => (
            '~',
            "waiting",
            "given back, still being read",
            "\x1b[34m",
            true,
        ),
        MapState::Claimed => (
            '+',
            "claimed",
            "promised to a waiting reserve",
            "\x1b[34m",
            false,
        ),
        MapState::Owned => (
            'o',
            "owned",
            "used by the consumer itself",
            "\x1b[37m",
            false,
        ),
        MapState::Stuck => (
            '!',
            "stuck",
            "its producer never came back",
            "\x1b[31m",
            false,
        ),
        MapState::Quarantined => (
            'X',
            "quarantined",
            "completion unknown, not reused",
            "\x1b[31m",
            true,
        ),
        _ => ('?', "other", "unknown to this version", "\x1b[37m", false),
    };
    Look {
        letter,
        name,
        meaning,
        colour,
        usual,
    }
}

fn position(state: MapState) -> usize {
    STATES
        .iter()
        .position(|&known| known == state)
        .unwrap_or(STATES.len())
}

/// One count for each of [`STATES`], and one for what this version does not know.
type PerState = [u64; STATES.len() + 1];

/// How to draw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapStyle {
    /// Columns of the terminal.
    pub(crate) columns: usize,
    /// Rows the grid may take.
    pub(crate) rows: usize,
    pub(crate) colours: bool,
}

/// Draws `runs` of a slab of `capacity` bytes, with a legend. Runs are in address order; gaps are free.
///
/// # Complexity
/// O(runs + cells).
pub(crate) fn draw(capacity: u64, runs: &[MapRun], style: MapStyle) -> String {
    let indent = 2;
    let width = style.columns.saturating_sub(indent).clamp(8, 128);
    let cells = (width * style.rows.max(1)) as u64;
    // Cells are whole granules, so that a small slab has few cells instead of fractions of bytes.
    let cell_len = capacity.div_ceil(cells).next_multiple_of(256).max(256);
    let cells = capacity.div_ceil(cell_len) as usize;

    let mut text = String::new();
    let mut painter = Painter {
        text: &mut text,
        colours: style.colours,
        current: None,
    };
    let states = cell_states(capacity, runs, cell_len, cells);
    for row in states.chunks(width) {
        painter.text.push_str("  ");
        for &state in row {
            painter.cell(state);
        }
        painter.end();
        painter.text.push('\n');
    }
    let mut bytes = PerState::default();
    let mut counts = PerState::default();
    for run in runs {
        bytes[position(run.state)] += run.len;
        counts[position(run.state)] += 1;
    }
    // What no run mentions is free, whether or not free runs are listed.
    let listed: u64 = bytes.iter().sum();
    bytes[position(MapState::Free)] += capacity.saturating_sub(listed);
    for state in STATES {
        let look = look(state);
        let (bytes, count) = (bytes[position(state)], counts[position(state)]);
        if bytes == 0 && !look.usual {
            continue;
        }
        painter.text.push_str("  ");
        painter.cell(state);
        painter.end();
        let share = if capacity == 0 {
            0.0
        } else {
            bytes as f64 * 100.0 / capacity as f64
        };
        let runs = if count == 1 {
            "1 run".to_owned()
        } else {
            format!("{count} runs")
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            painter.text,
            " {:<11} {:>10} {share:>5.1} %  {runs:>9}  {}",
            look.name,
            show_size(bytes),
            look.meaning
        );
    }
    let _ = writeln!(
        painter.text,
        "  one cell is {}, the slab {}",
        show_size(cell_len),
        show_size(capacity)
    );
    text
}

/// For each cell the state that covers most of it.
fn cell_states(capacity: u64, runs: &[MapRun], cell_len: u64, cells: usize) -> Vec<MapState> {
    let mut states = Vec::with_capacity(cells);
    let mut next = 0;
    for cell in 0..cells as u64 {
        let start = cell * cell_len;
        let end = (start + cell_len).min(capacity);
        let mut covered = PerState::default();
        while let Some(run) = runs.get(next) {
            let run_end = run.offset.saturating_add(run.len);
            covered[position(run.state)] += run_end.min(end).saturating_sub(run.offset.max(start));
            if run_end > end {
                break;
            }
            next += 1;
        }
        let listed: u64 = covered.iter().sum();
        covered[position(MapState::Free)] += (end - start).saturating_sub(listed);
        let most = STATES
            .into_iter()
            .max_by_key(|&state| covered[position(state)])
            .unwrap_or(MapState::Free);
        states.push(most);
    }
    states
}

/// Writes cells, changing the colour only where the state changes.
struct Painter<'a> {
    text: &'a mut String,
    colours: bool,
    current: Option<MapState>,
}

impl Painter<'_> {
    fn cell(&mut self, state: MapState) {
        if self.colours && self.current != Some(state) {
            self.end();
            self.text.push_str(look(state).colour);
            self.current = Some(state);
        }
        self.text.push(look(state).letter);
    }

    fn end(&mut self) {
        if self.current.take().is_some() {
            self.text.push_str("\x1b[0m");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: MapStyle = MapStyle {
        columns: 12,
        rows: 2,
        colours: false,
    };

    fn run(offset: u64, len: u64, state: MapState) -> MapRun {
        MapRun { offset, len, state }
    }

    fn grid(capacity: u64, runs: &[MapRun], style: MapStyle) -> Vec<String> {
        draw(capacity, runs, style)
            .lines()
            .take_while(|line| !line.contains("nobody's"))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn each_cell_shows_what_covers_most_of_it() {
        let runs = [
            run(0, 1024, MapState::Leased),
            run(1024, 256, MapState::Writing),
            run(1280, 256, MapState::Free),
            run(1536, 2560, MapState::Resident),
        ];
        assert_eq!(
            grid(20 * 512, &runs, PLAIN),
            ["  LLw#####..", "  .........."]
        );
    }

    #[test]
    fn a_slab_smaller_than_the_grid_has_one_cell_a_granule() {
        assert_eq!(
            grid(700, &[run(256, 300, MapState::Ready)], PLAIN),
            ["  .r."]
        );
    }

    #[test]
    fn the_legend_counts_bytes_and_runs_and_names_unusual_states_only_when_present() {
        let text = draw(
            4096,
            &[
                run(0, 256, MapState::Resident),
                run(256, 256, MapState::Resident),
                run(512, 1024, MapState::Quarantined),
            ],
            PLAIN,
        );
        assert!(
            text.contains("# resident         512 B  12.5 %     2 runs"),
            "{text}"
        );
        assert!(text.contains("X quarantined"), "{text}");
        assert!(text.contains(". free           2.5 KiB  62.5 %"), "{text}");
        assert!(!text.contains("stuck"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn no_line_is_wider_than_an_ordinary_terminal() {
        let states = STATES.iter().enumerate().flat_map(|(index, &state)| {
            (0..100_000).map(move |run| (index as u64 * 100_000 + run, state))
        });
        let runs: Vec<_> = states
            .map(|(number, state)| run(number << 20, 1_047_500, state))
            .collect();
        let style = MapStyle {
            columns: 80,
            ..PLAIN
        };
        for line in draw(1 << 40, &runs, style).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn colours_are_closed_on_every_line() {
        let style = MapStyle {
            colours: true,
            ..PLAIN
        };
        let text = draw(8192, &[run(0, 4096, MapState::Resident)], style);
        for line in text.lines() {
            let opened = line.matches("\x1b[").count();
            let closed = line.matches("\x1b[0m").count();
            assert_eq!(opened, 2 * closed, "{line:?}");
        }
    }

    #[test]
    fn lines_fit_the_terminal_and_odd_sizes_do_not_panic() {
        for columns in [0, 1, 20, 80, 1000] {
            for capacity in [0, 1, 255, 256, 1 << 40, u64::MAX >> 8] {
                let style = MapStyle {
                    columns,
                    rows: 4,
                    colours: false,
                };
                let rows = grid(capacity, &[run(0, capacity, MapState::Leased)], style);
                assert!(rows.len() <= 4);
                for row in rows {
                    assert!(row.len() <= columns.clamp(10, 130), "{row}");
                }
            }
        }
    }
}
