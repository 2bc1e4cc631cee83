//! Shell: how a case is played on a stage, and judged.

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
    calls::{Call, Case},
    own::Count,
    stage::{SOURCES, Stage, until},
    table::Row,
};
use crate::bed::SERVING;

/// How long a client sends that would go on.
const LOAD: Duration = Duration::from_millis(700);
/// A server's own count is final once nothing has come for so long.
const QUIET: Duration = Duration::from_millis(300);
/// … and so is what it has open.
const STEADY: Duration = Duration::from_millis(100);

/// What both have counted: the kernel half and the server.
#[derive(Clone, Copy, Debug)]
struct Counts {
    kernel: Count,
    own: Count,
    /// Requests that ended without a whole response, as the kernel half says.
    cut: u64,
}

/// What was seen while requests were held open.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Whether they were as many as they should be.
    is_all: bool,
    in_flight: [u64; 2],
    kernel: Count,
    own: Count,
}

impl Stage {
    /// Plays a case and notes its row.
    pub(super) fn run(&mut self, case: &Case) {
        let before = self.counts();
        let held = self.hold(case, before);
        for (number, call) in case.load.iter().enumerate() {
            let child = self.begin((number, call));
            self.end(child, number, call);
        }
        let sent: Option<u64> = case.hold.iter().chain(&case.load).map(|call| call.sends).sum();
        self.settle(|now| Some(now.since(before.own).begun) == sent);
        let after = self.counts();
        let row = Row {
            server: self.server,
            client: case.client,
            protocol: case.protocol,
            during: held.in_flight,
            after: [self.in_flight(), self.own().open()],
            kernel: after.kernel.since(before.kernel),
            own: after.own.since(before.own),
        };
        // A client that may fail may do so by breaking off.
        let breaks_off = sent.is_none() || case.load.iter().any(|call| call.may_fail);
        let to_cut = case.hold.iter().chain(&case.load).map(|call| call.cut).sum();
        let cut = if breaks_off { to_cut } else { after.cut - before.cut };
        self.judge(case.held, &row, held, sent, [cut, to_cut]);
        self.rows.push(row);
    }

    fn counts(&self) -> Counts {
        Counts { kernel: self.kernel(), own: self.own(), cut: self.cut() }
    }

    /// Has requests held open, looks at both counts, and lets them go on.
    fn hold(&mut self, case: &Case, before: Counts) -> Held {
        let gate = self.file("gate");
        let _opened_before = fs::remove_file(&gate);
        let clients: Vec<_> = case.hold.iter().enumerate().map(|it| self.begin(it)).collect();
        // All have come that will, and as many are open as should be.
        let to_come: Option<u64> = case.hold.iter().map(|call| call.sends).sum();
        let mut own = Count::default();
        let is_all = until_steady(|| {
            own = self.own().since(before.own);
            own.open() == case.held && to_come.is_none_or(|count| own.begun == count)
        });
        // Whatever went before on these connections has ended, for the server and so for the kernel.
        until(|| (self.in_flight(), self.kernel().since(before.kernel)) == (case.held, own));
        let kernel = self.kernel().since(before.kernel);
        let held = Held { is_all, in_flight: [self.in_flight(), own.open()], kernel, own };
        fs::write(&gate, "").unwrap();
        for (child, (number, call)) in clients.into_iter().zip(case.hold.iter().enumerate()) {
            self.end(child, number, call);
        }
        held
    }

    /// Notes what is wrong with a row.
    fn judge(&mut self, to_hold: u64, row: &Row, held: Held, sent: Option<u64>, cut: [u64; 2]) {
        let what = format!("{} × {} × {}", row.server, row.client, row.protocol);
        if !held.is_all || row.difference() != 0 {
            let state = self.bed.maps.state(u32::from(self.pod.number));
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

    fn begin(&self, (number, call): (usize, &Call)) -> Child {
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

    /// Waits for a client; its input ends, which is what those wait for that keep WebSockets.
    fn end(&mut self, mut child: Child, number: usize, call: &Call) {
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

    /// Waits until nothing is open and the server's count stands still, which it does at once where all have come.
    fn settle(&self, is_all: impl Fn(Count) -> bool) {
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

/// Waits until `so` for a while: a server that writes its log and its status at different times is at both for moments that
/// never were.
fn until_steady(mut so: impl FnMut() -> bool) -> bool {
    let mut since = None;
    until(|| {
        since = if so() { since.or_else(|| Some(Instant::now())) } else { None };
        since.is_some_and(|since: Instant| since.elapsed() > STEADY)
    })
}
