//! Shell: runs a case on a stage and compares the counts.

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
    calls::{ClientCall, ClientCase},
    own::RequestCount,
    stage::{SOURCES, ServerFixture, until},
    table::ServerRow,
};
use crate::bed::SERVING;

/// Sending time of a client that would not end by itself.
const LOAD: Duration = Duration::from_millis(700);
/// Time without new requests after which a server's own count is final.
const QUIET: Duration = Duration::from_millis(300);
/// Time without a change after which the number of open requests is final.
const STEADY: Duration = Duration::from_millis(100);

/// Counts of both: of the eBPF programs and of the server.
#[derive(Clone, Copy, Debug)]
struct ComparedCounts {
    kernel: RequestCount,
    own: RequestCount,
    /// Number of requests without a whole response, by the eBPF programs.
    cut: u64,
}

/// Observation while requests were held open.
#[derive(Clone, Copy, Debug)]
struct HeldRequestsCheck {
    /// True if the expected number of requests was held.
    is_all: bool,
    in_flight: [u64; 2],
    kernel: RequestCount,
    own: RequestCount,
}

impl ServerFixture {
    /// Runs a case and adds its row.
    pub(super) fn run(&mut self, case: &ClientCase) {
        let before = self.counts();
        let held = self.hold(case, before);
        for (number, call) in case.load.iter().enumerate() {
            let child = self.begin((number, call));
            self.end(child, number, call);
        }
        let sent: Option<u64> = case.hold.iter().chain(&case.load).map(|call| call.sends).sum();
        self.settle(|now| Some(now.since(before.own).begun) == sent);
        let after = self.counts();
        let row = ServerRow {
            server: self.server,
            client: case.client,
            protocol: case.protocol,
            during: held.in_flight,
            after: [self.in_flight(), self.own().open()],
            kernel: after.kernel.since(before.kernel),
            own: after.own.since(before.own),
        };
        // A client that may fail may also break off requests.
        let breaks_off = sent.is_none() || case.load.iter().any(|call| call.may_fail);
        let to_cut = case.hold.iter().chain(&case.load).map(|call| call.cut).sum();
        let cut = if breaks_off { to_cut } else { after.cut - before.cut };
        self.judge(case.held, &row, held, sent, [cut, to_cut]);
        self.rows.push(row);
    }

    fn counts(&self) -> ComparedCounts {
        ComparedCounts { kernel: self.kernel(), own: self.own(), cut: self.cut() }
    }

    /// Starts requests that are held open, reads both counts, and lets the requests end.
    fn hold(&mut self, case: &ClientCase, before: ComparedCounts) -> HeldRequestsCheck {
        let gate = self.file("gate");
        let _opened_before = fs::remove_file(&gate);
        let clients: Vec<_> = case.hold.iter().enumerate().map(|it| self.begin(it)).collect();
        // All expected requests have arrived, and the right number is open.
        let to_come: Option<u64> = case.hold.iter().map(|call| call.sends).sum();
        let mut own = RequestCount::default();
        let is_all = poll_until_steady(|| {
            own = self.own().since(before.own);
            own.open() == case.held && to_come.is_none_or(|count| own.begun == count)
        });
        // Earlier requests on these connections have ended for the server, so they must have ended for the programs.
        until(|| (self.in_flight(), self.kernel().since(before.kernel)) == (case.held, own));
        let kernel = self.kernel().since(before.kernel);
        let held =
            HeldRequestsCheck { is_all, in_flight: [self.in_flight(), own.open()], kernel, own };
        fs::write(&gate, "").unwrap();
        for (child, (number, call)) in clients.into_iter().zip(case.hold.iter().enumerate()) {
            self.end(child, number, call);
        }
        held
    }

    /// Adds descriptions of all errors in a row.
    fn judge(
        &mut self,
        to_hold: u64,
        row: &ServerRow,
        held: HeldRequestsCheck,
        sent: Option<u64>,
        cut: [u64; 2],
    ) {
        let what = format!("{} × {} × {}", row.server, row.client, row.protocol);
        if !held.is_all || row.difference() != 0 {
            let state = self.bed.maps.pod_state(u32::from(self.pod.number));
            self.wrong.push(format!("{what}: {row:?}, {to_hold} to be held, {state:?}"));
        }
        if held.kernel != held.own {
            self.wrong.push(format!("{what}: while held {}, not {}", held.kernel, held.own));
        }
        let [cut, to_cut] = cut;
        if cut != to_cut {
            self.wrong.push(format!("{what}: {cut} requests counted as cut, and {to_cut} were"));
        }
        if sent.is_some_and(|sent| sent != row.own.begun) {
            self.wrong.push(format!("{what}: {sent:?} were sent, the server saw {}", row.own));
        }
    }

    fn begin(&self, (number, call): (usize, &ClientCall)) -> Child {
        let address = format!("{}:{SERVING}", self.pod.four());
        let fill = |word: &String| {
            word.replace("{url}", &format!("http://{address}"))
                .replace("{ws}", &format!("ws://{address}"))
                .replace("{address}", &address)
                .replace("{servers}", SOURCES)
                .replace("{folder}", &self.folder.0.display().to_string())
        };
        let words: Vec<String> = call.words.iter().map(fill).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.spawn(&mut self.inside(&self.client, &words), &format!("call{number}"))
    }

    /// Waits for a client, after closing its input, for which clients with WebSockets wait.
    fn end(&mut self, mut child: Child, number: usize, call: &ClientCall) {
        drop(child.stdin.take());
        if call.is_endless {
            thread::sleep(LOAD);
            signal::kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
        }
        let mut status: Option<ExitStatus> = None;
        until(|| {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        if status.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        if !status.is_some_and(|status| status.success()) && !call.may_fail {
            let printed = self.printed(&format!("call{number}"));
            let words = call.words.join(" ");
            self.wrong.push(format!("{}: `{words}` ended with {status:?}: {printed}", self.server));
        }
    }

    /// Waits until no request is open and the server's count is final: at once if all have arrived, else after a
    /// quiet time.
    fn settle(&self, is_all: impl Fn(RequestCount) -> bool) {
        until(|| self.in_flight() == 0 && self.own().open() == 0 && self.surplus() == 0);
        if is_all(self.own()) {
            return;
        }
        let (mut last, mut since) = (self.own(), Instant::now());
        while since.elapsed() < QUIET {
            thread::sleep(Duration::from_millis(20));
            let now = self.own();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
    }
}

/// Waits until `so` is true for a while: a server that updates its log and its status at different times shows
/// inconsistent values for moments.
fn poll_until_steady(mut so: impl FnMut() -> bool) -> bool {
    let mut since = None;
    until(|| {
        since = if so() { since.or_else(|| Some(Instant::now())) } else { None };
        since.is_some_and(|since: Instant| since.elapsed() > STEADY)
    })
}
