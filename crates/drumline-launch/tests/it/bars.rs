//! Progress bars of several ranks: one row for each on a terminal, a line at intervals elsewhere.

use super::console::on_terminal;
use super::launched::on_console;

/// Eight states of a bar as tqdm draws them, with an ordinary line among them.
const BAR: &str = r"for i in 1 2 3 4 5 6 7 8; do printf '\rbar %d' $i >&2; sleep 0.15; test $i != 4 || echo line; done
                    echo >&2";

/// The rows of a terminal that was sent `text`, without colours.
fn screen(text: &str) -> Vec<String> {
    let (mut rows, mut row, mut column) = (vec![Vec::new()], 0, 0);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\n' => (row, column) = (row + 1, 0),
            '\r' => column = 0,
            '\x1b' => {
                let sequence: String =
                    chars.by_ref().skip(1).take_while(|c| !c.is_ascii_alphabetic()).collect();
                let last = text[..text.len() - chars.as_str().len()].chars().next_back();
                match last {
                    Some('A') => row -= sequence.parse::<usize>().unwrap(),
                    Some('J') => {
                        rows.truncate(row + 1);
                        rows[row].truncate(column);
                    }
                    Some('K') => rows[row].truncate(column),
                    _ => {}
                }
            }
            c => {
                let cells = &mut rows[row];
                cells.resize(cells.len().max(column + 1), ' ');
                cells[column] = c;
                column += 1;
            }
        }
        rows.resize(rows.len().max(row + 1), Vec::new());
    }
    rows.into_iter().map(|row| row.into_iter().collect()).collect()
}

#[test]
fn each_ranks_bar_stays_one_row_of_a_terminal() {
    let text = on_terminal(&on_console(2, BAR), &[]);
    let drawn = (2..8).filter(|state| text.contains(&format!("bar {state}"))).count();
    assert!(drawn >= 3, "control: it was drawn while it advanced: {text:?}");
    let rows = screen(&text);
    for rank in 0..2 {
        let of_rank: Vec<_> =
            rows.iter().filter(|row| row.starts_with(&format!("[rank {rank}]: "))).collect();
        assert_eq!(of_rank, [&format!("[rank {rank}]: line"), &format!("[rank {rank}]: bar 8")], "{rows:#?}");
    }
}

#[test]
fn without_a_terminal_a_bar_is_a_line_at_intervals_and_its_last_state() {
    let (stdout, stderr) = on_console(2, BAR).run();
    for rank in 0..2 {
        let of_rank = |text: &str| -> Vec<String> {
            let prefix = format!("[rank {rank}]: ");
            text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_string).collect()
        };
        assert_eq!(of_rank(&stdout), ["line"]);
        assert_eq!(of_rank(&stderr), ["bar 1", "bar 8"], "{stderr}");
    }
}

#[test]
fn a_bar_that_is_cut_off_keeps_its_last_state() {
    let script = r"printf '\r10%%' >&2; sleep 0.3; printf '\r20%%' >&2";
    let rows = screen(&on_terminal(&on_console(1, script), &[]));
    assert!(
        rows.iter().any(|row| row == "[rank 0]: 20%") && !rows.iter().any(|row| row.contains("10%")),
        "{rows:#?}"
    );
    let (_, stderr) = on_console(1, script).run();
    assert!(stderr.contains("[rank 0]: 10%\n[rank 0]: 20%\n"), "{stderr}");
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_gets_lines() {
    let text = on_terminal(&on_console(1, BAR), &[("TERM", "dumb"), ("NO_COLOR", "1")]);
    assert!(
        !text.contains('\x1b') && text.contains("[rank 0]: bar 1\n") && text.contains("[rank 0]: bar 8\n"),
        "{text:?}"
    );
}
