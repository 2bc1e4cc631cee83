//! Shell: runs a case against a server and compares the counts.

use std::{
    fs,
    process::{Child, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};

use super::{
    client_commands::{ClientCall, ClientCase},
    results_table::ServerRow,
    server_counts::RequestCount,
    server_fixture::{SOURCES, ServerFixture, poll_until},
};
use crate::fixture::SERVING_PORT;

/// Sending time of a client that would not end by itself.
const LOAD_TIME: Duration = Duration::from_millis(700);
/// Time without new requests after which a server's own count is final.
const QUIET_TIME: Duration = Duration::from_millis(300);
/// Time without a change after which the number of open requests is final.
const STEADY_TIME: Duration = Duration::from_millis(100);

/// Counts of both: of the eBPF programs and of the server.
#[derive(Clone, Copy, Debug)]
struct ComparedCounts {
    kernel: RequestCount,
    server: RequestCount,
    /// Number of requests without a whole response, by the eBPF programs.
    cut: u64,
}

/// Observation while requests were held open.
#[derive(Clone, Copy, Debug)]
struct HeldRequestsCheck {
    /// True if the expected number of requests was held.
    is_complete: bool,
    in_flight: [u64; 2],
    kernel: RequestCount,
    server: RequestCount,
}

impl ServerFixture {
    /// Runs a case and adds its row.
    pub(super) fn run_case(&mut self, case: &ClientCase) {
        let before = self.read_counts();
        let check = self.hold_requests(case, before);
        for (number, call) in case.load_calls.iter().enumerate() {
            let begun = self.server_count().begun;
            let child = self.start_client((number, call));
            if call.is_endless {
                poll_until(|| self.server_count().begun > begun);
            }
            self.finish_client(child, number, call);
        }
        let sent: Option<u64> =
            case.held_calls.iter().chain(&case.load_calls).map(|call| call.request_count).sum();
        self.wait_settled(before, sent);
        let after = self.read_counts();
        let row = ServerRow {
            server: self.server,
            client: case.client,
            protocol: case.protocol,
            held_in_flight: check.in_flight,
            final_in_flight: [self.in_flight(), self.server_count().open()],
            kernel_count: after.kernel.since(before.kernel),
            server_count: after.server.since(before.server),
        };
        // A client that may fail may also break off requests.
        let breaks_off = sent.is_none() || case.load_calls.iter().any(|call| call.may_fail);
        let to_cut = case.held_calls.iter().chain(&case.load_calls).map(|call| call.cut).sum();
        let cut = if breaks_off { to_cut } else { after.cut - before.cut };
        self.check_row(case.held, &row, check, sent, [cut, to_cut]);
        self.rows.push(row);
    }

    fn read_counts(&self) -> ComparedCounts {
        ComparedCounts {
            kernel: self.kernel_count(),
            server: self.server_count(),
            cut: self.cut_responses(),
        }
    }

    /// Starts requests that are held open, reads both counts, and lets the requests end.
    fn hold_requests(&mut self, case: &ClientCase, before: ComparedCounts) -> HeldRequestsCheck {
        let gate = self.path("gate");
        let _opened_before = fs::remove_file(&gate);
        let clients: Vec<_> =
            case.held_calls.iter().enumerate().map(|it| self.start_client(it)).collect();
        // All expected requests have arrived, and the right number is open.
        let to_come: Option<u64> = case.held_calls.iter().map(|call| call.request_count).sum();
        let mut server_count = RequestCount::default();
        let is_complete = poll_until_steady(|| {
            server_count = self.server_count().since(before.server);
            server_count.open() == case.held
                && to_come.is_none_or(|count| server_count.begun == count)
        });
        // Earlier requests on these connections have ended for the server, so they must have ended for the programs.
        poll_until(|| {
            (self.in_flight(), self.kernel_count().since(before.kernel))
                == (case.held, server_count)
        });
        let kernel = self.kernel_count().since(before.kernel);
        let check = HeldRequestsCheck {
            is_complete,
            in_flight: [self.in_flight(), server_count.open()],
            kernel,
            server: server_count,
        };
        fs::write(&gate, "").unwrap();
        for (child, (number, call)) in clients.into_iter().zip(case.held_calls.iter().enumerate()) {
            self.finish_client(child, number, call);
        }
        check
    }

    /// Adds descriptions of all errors in a row.
    fn check_row(
        &mut self,
        to_hold: u64,
        row: &ServerRow,
        check: HeldRequestsCheck,
        sent: Option<u64>,
        cut: [u64; 2],
    ) {
        let description = format!("{} × {} × {}", row.server, row.client, row.protocol);
        if !check.is_complete || row.difference() != 0 {
            let state = self.kernel.maps.pod_state(u32::from(self.pod.number));
            self.failures.push(format!("{description}: {row:?}, {to_hold} to be held, {state:?}"));
        }
        if check.kernel != check.server {
            self.failures
                .push(format!("{description}: while held {}, not {}", check.kernel, check.server));
        }
        let [cut, to_cut] = cut;
        if cut != to_cut {
            self.failures
                .push(format!("{description}: {cut} requests counted as cut, and {to_cut} were"));
        }
        if sent.is_some_and(|sent| sent != row.server_count.begun) {
            self.failures.push(format!(
                "{description}: {sent:?} were sent, the server saw {}",
                row.server_count
            ));
        }
    }

    fn start_client(&self, (number, call): (usize, &ClientCall)) -> Child {
        let address = format!("{}:{SERVING_PORT}", self.pod.ipv4());
        let fill = |word: &String| {
            word.replace("{url}", &format!("http://{address}"))
                .replace("{ws}", &format!("ws://{address}"))
                .replace("{address}", &address)
                .replace("{servers}", SOURCES)
                .replace("{folder}", &self.folder.0.display().to_string())
        };
        let args: Vec<String> = call.words.iter().map(fill).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.spawn(&mut self.netns_command(&self.client, &args), &format!("call{number}"))
    }

    /// Waits for a client, after closing its input, for which clients with WebSockets wait. An endless client has sent
    /// requests.
    fn finish_client(&mut self, mut child: Child, number: usize, call: &ClientCall) {
        drop(child.stdin.take());
        if call.is_endless {
            thread::sleep(LOAD_TIME);
            poll_until(|| catches_interrupts(child.id()));
            signal::kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
        }
        let mut status: Option<ExitStatus> = None;
        poll_until(|| {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        if status.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        if !status.is_some_and(|status| status.success()) && !call.may_fail {
            let output = self.output(&format!("call{number}"));
            let args = call.words.join(" ");
            self.failures
                .push(format!("{}: `{args}` ended with {status:?}: {output}", self.server));
        }
    }

    /// Waits until no request is open and the server's count is final: at once if all `sent` requests have arrived, else
    /// after a quiet time. Until a timeout it also waits for equal counts, as a server on a busy machine may be quiet
    /// for long before it reads what clients have left.
    fn wait_settled(&self, before: ComparedCounts, sent: Option<u64>) {
        poll_until(|| {
            self.in_flight() == 0
                && self.server_count().open() == 0
                && self.connection_difference() == 0
        });
        let server_count = || self.server_count().since(before.server);
        if Some(server_count().begun) == sent {
            return;
        }
        let (mut last, mut since) = (server_count(), Instant::now());
        poll_until(|| {
            let now = server_count();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            since.elapsed() >= QUIET_TIME && now == self.kernel_count().since(before.kernel)
        });
    }
}

/// Returns true if a process has a handler for SIGINT. Before its client has one, the signal would kill it.
fn catches_interrupts(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (Signal::SIGINT as u32 - 1)) != 0)
}

/// Waits until `is_done` is true for a while: a server that updates its log and its status at different times shows
/// inconsistent values for moments.
fn poll_until_steady(mut is_done: impl FnMut() -> bool) -> bool {
    let mut done_since = None;
    poll_until(|| {
        done_since = if is_done() { done_since.or_else(|| Some(Instant::now())) } else { None };
        done_since.is_some_and(|done_since: Instant| done_since.elapsed() > STEADY_TIME)
    })
}
