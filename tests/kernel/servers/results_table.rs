//! Shell: the table of servers, clients and protocols, as Markdown.

use std::{
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use super::server_counts::RequestCount;

/// Rows of all tests of this run.
static ROWS: Mutex<Vec<ServerRow>> = Mutex::new(Vec::new());

/// Results of one case.
#[derive(Clone, Debug)]
pub(super) struct ServerRow {
    pub(super) server: &'static str,
    pub(super) client: &'static str,
    pub(super) protocol: &'static str,
    /// Requests in flight while the server held requests open: by the eBPF programs, and by the server.
    pub(super) held_in_flight: [u64; 2],
    /// Requests in flight after all clients had gone: by the eBPF programs, and by the server.
    pub(super) final_in_flight: [u64; 2],
    /// Numbers of requests that began and ended in this case, by the eBPF programs.
    pub(super) kernel_count: RequestCount,
    pub(super) server_count: RequestCount,
}

impl ServerRow {
    /// Sum of the differences of all compared numbers.
    pub(super) fn difference(&self) -> u64 {
        let pairs = [
            self.held_in_flight,
            self.final_in_flight,
            [self.kernel_count.begun, self.server_count.begun],
            [self.kernel_count.ended, self.server_count.ended],
        ];
        pairs.iter().map(|[one, other]| one.abs_diff(*other)).sum()
    }

    fn cells(&self) -> [String; 8] {
        let [kernel, server] = self.held_in_flight;
        let during =
            if kernel == server { format!("{kernel}") } else { format!("{kernel} ≠ {server}") };
        let [kernel, server] = self.final_in_flight;
        let after =
            if kernel == server { format!("{kernel}") } else { format!("{kernel} ≠ {server}") };
        [
            self.server.into(),
            self.client.into(),
            self.protocol.into(),
            during,
            after,
            self.kernel_count.to_string(),
            self.server_count.to_string(),
            self.difference().to_string(),
        ]
    }
}

const HEADINGS: [&str; 8] = [
    "server",
    "client",
    "protocol",
    "in flight during",
    "after",
    "begun/ended in the kernel",
    "server's own count",
    "difference",
];

/// Prints the rows of one server, and writes the table of all rows so far.
#[allow(clippy::print_stdout, reason = "the table is for people")]
pub(super) fn print_and_save(rows: &[ServerRow]) {
    println!("{}", markdown(rows));
    let mut saved_rows = ROWS.lock().unwrap_or_else(PoisonError::into_inner);
    saved_rows.extend_from_slice(rows);
    let text = format!(
        "Requests as the eBPF programs count them, and as the servers do themselves. Written by \
         `cargo xtask test --tier kernel -- servers::`.\n\n{}",
        markdown(&saved_rows)
    );
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a directory in target/");
    fs::write(target.join("servers.md"), text).expect("target/ can be written");
}

/// Formats rows as a table whose columns have the width of their widest cell.
fn markdown(rows: &[ServerRow]) -> String {
    let cells: Vec<[String; 8]> = rows.iter().map(ServerRow::cells).collect();
    let width = |column: usize| {
        let longest = cells.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        longest.max(HEADINGS[column].chars().count())
    };
    let line = |texts: [&str; 8]| {
        let padded = texts.iter().enumerate().map(|(at, text)| format!("{text:<0$}", width(at)));
        format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
    };
    let rules: Vec<String> = (0..8).map(|at| "-".repeat(width(at))).collect();
    let head = line(HEADINGS) + &line(std::array::from_fn(|at| rules[at].as_str()));
    let body = cells.iter().map(|row| line(std::array::from_fn(|at| row[at].as_str())));
    head + &body.collect::<String>()
}
