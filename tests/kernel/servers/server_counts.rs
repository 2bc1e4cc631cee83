//! Shell: counts of the servers themselves: request records, logs and status pages.

use std::{
    fmt, fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

/// Numbers of requests since the start of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestCount {
    pub(super) begun: u64,
    pub(super) ended: u64,
}

impl RequestCount {
    pub(super) fn open(self) -> u64 {
        self.begun - self.ended
    }

    /// Numbers of requests since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        Self { begun: self.begun - before.begun, ended: self.ended - before.ended }
    }
}

impl fmt::Display for RequestCount {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.begun, self.ended)
    }
}

/// Source of a server's own count.
#[derive(Clone, Debug)]
pub(super) enum ServerCountSource {
    /// File with `+` for each request that begins, and `-` for each that ends.
    RequestRecord(PathBuf),
    /// Log with a line for each request that has ended, and the socket of the status page with the open ones.
    Nginx { log: PathBuf, status: PathBuf },
    /// Log with a line for each request that has ended, and the socket of haproxy's statistics with the open ones.
    Haproxy { log: PathBuf, stats: PathBuf },
    /// Log with a line for each request that has ended, and the request record of the application behind it with the
    /// open ones.
    Apache { log: PathBuf, backend: PathBuf },
}

impl ServerCountSource {
    pub(super) fn read(&self) -> RequestCount {
        let from_log = |log: &Path, open: u64| {
            let ended = line_count(log);
            RequestCount { begun: ended + open, ended }
        };
        match self {
            Self::RequestRecord(record) => read_request_record(record),
            Self::Nginx { log, status } => from_log(log, nginx_writing(status)),
            Self::Haproxy { log, stats } => from_log(log, haproxy_current(stats)),
            Self::Apache { log, backend } => from_log(log, read_request_record(backend).open()),
        }
    }
}

fn read_request_record(record: &Path) -> RequestCount {
    let text = fs::read(record).unwrap_or_default();
    let count = |sign: u8| text.iter().filter(|byte| **byte == sign).count() as u64;
    // Each request appends `+` before `-`, and the file is read at one moment, so `-` is never ahead.
    RequestCount { begun: count(b'+'), ended: count(b'-') }
}

fn line_count(log: &Path) -> u64 {
    fs::read(log).unwrap_or_default().iter().filter(|byte| **byte == b'\n').count() as u64
}

/// `Writing` of nginx' `stub_status`: requests with a complete head and an incomplete response, without this query.
fn nginx_writing(status: &Path) -> u64 {
    let page = query_socket(status, "GET / HTTP/1.0\r\n\r\n");
    let (_, rest) = page.split_once("Writing: ").unwrap_or_else(|| panic!("no status: {page}"));
    let number = rest.split_whitespace().next().unwrap_or_default();
    number.parse::<u64>().expect("a number") - 1
}

/// Number of requests that haproxy has open to its backends.
fn haproxy_current(stats: &Path) -> u64 {
    let table = query_socket(stats, "show stat\n");
    let mut rows = table.trim_start_matches("# ").lines().map(|line| line.split(',').collect());
    let names: Vec<&str> = rows.next().unwrap_or_default();
    let column = |name| names.iter().position(|it| *it == name).expect("haproxy has that column");
    let (kind, current) = (column("svname"), column("scur"));
    let backends = rows.filter(|row: &Vec<&str>| row.get(kind) == Some(&"BACKEND"));
    backends.map(|row| row[current].parse::<u64>().expect("a number")).sum()
}

fn query_socket(socket: &Path, question: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("the server has that socket");
    stream.write_all(question.as_bytes()).expect("it takes a question");
    let mut output = String::new();
    stream.read_to_string(&mut output).expect("it answers");
    output
}
