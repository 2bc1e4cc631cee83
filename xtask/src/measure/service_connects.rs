//! Shell: connects to Services of a cluster, from the present namespace and cgroup: the backend that each reaches, the
//! Services that answer, and connects that fail.

use std::{
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::Result;
use nix::sys::{
    prctl,
    socket::{getsockopt, setsockopt, sockopt},
};
use serde::{Deserialize, Serialize};

use super::{MeasuredTimes, datagrams::is_answered};
use crate::{load::unix_us, sh};

/// Port of all Services that are measured.
pub(crate) const SERVICE_PORT: u16 = 80;
/// Largest segments that the two backends of a Service offer to their clients, in bytes.
///
/// They tell a client which backend it has reached, without a byte that a server would have to send. Every translation
/// of addresses leaves them as they are, and a client's segments are at most as large.
pub(crate) const SEGMENT_SIZES: [u16; 2] = [1_000, 1_200];
/// Timeout of a connect whose failure counts as an outage.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a connect to a Service that may not be served yet. An answer takes some 30 µs.
const UNSERVED_TIMEOUT: Duration = Duration::from_millis(20);
/// Pause between two attempts to reach the Services that have not answered.
const ANSWER_PAUSE: Duration = Duration::from_millis(2);

/// Measurement of the hidden command `xtask measure services`.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum ServiceMeasureCommand {
    /// Connect again and again until killed; print a JSON line whenever another backend is reached
    Backends {
        #[arg(long)]
        addr: SocketAddr,
        #[arg(long)]
        every_us: u64,
    },
    /// Wait until consecutive addresses answer: first a sample, then all of them
    Answers {
        #[command(flatten)]
        range: ServiceRange,
        /// Send datagrams instead of connects
        #[arg(long)]
        udp: bool,
        /// Number of Services in the sample, which is connected to until all of it answers
        #[arg(long, default_value_t = 200)]
        sample: usize,
        /// Give up if no Service has answered within so many seconds
        #[arg(long)]
        timeout_s: u64,
        /// Give up once no further Service has answered for so many seconds
        #[arg(long, default_value_t = 30)]
        patience_s: u64,
    },
    /// Connect to consecutive addresses in turn, at a fixed rate
    Steady {
        #[command(flatten)]
        range: ServiceRange,
        #[arg(long)]
        every_us: u64,
        #[arg(long)]
        millis: u64,
    },
}

/// Consecutive ClusterIPs.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServiceRange {
    #[arg(long)]
    first: Ipv4Addr,
    #[arg(long)]
    count: u32,
}

/// Backend of a Service, as a connect reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReachedBackend {
    /// The one that offers the first of [`SEGMENT_SIZES`].
    First,
    /// The one that offers the second of them.
    Second,
    /// A server that offers larger segments.
    Other,
    /// None: the connect failed.
    Nothing,
}

/// Change of the backend that connects reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackendChange {
    /// End of the first connect that reached it, Unix time in µs.
    pub(crate) at_us: u64,
    pub(crate) backend: ReachedBackend,
}

/// Services that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServiceAnswers {
    /// Time at which the last of them first answered, Unix time in µs; 0 if none did.
    pub(crate) last_us: u64,
    pub(crate) answered: usize,
    pub(crate) unanswered: usize,
}

/// Results of connects at a fixed rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SteadyConnects {
    pub(crate) sent: usize,
    pub(crate) failed: usize,
    /// Median time from the moment at which a connect was due until its end, in µs. It contains the wait for an earlier
    /// connect that took longer than a period.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Time after which a scan ends although Services are missing.
#[derive(Clone, Copy, Debug)]
struct ScanPatience {
    /// Longest time until the first answer.
    first_answer: Duration,
    /// Longest time without a further answer.
    next_answer: Duration,
}

/// One attempt to reach a Service that may not be served yet. Returns true if it answers.
type AnswerAttempt = fn(SocketAddr) -> bool;

/// Result of one scan.
#[derive(Debug)]
struct AnswerScan {
    missing: Vec<SocketAddr>,
    /// Time of the last answer, Unix time in µs.
    last_us: Option<u64>,
    /// Time of the last answer of a Service whose first attempt had failed.
    last_late_us: Option<u64>,
}

/// Runs the hidden command `xtask measure services`.
pub(crate) fn run(what: &ServiceMeasureCommand) -> Result<()> {
    match what {
        ServiceMeasureCommand::Backends { addr, every_us } => {
            print_backend_changes(*addr, Duration::from_micros(*every_us));
        }
        ServiceMeasureCommand::Answers { range, udp, sample, timeout_s, patience_s } => {
            let patience = ScanPatience {
                first_answer: Duration::from_secs(*timeout_s),
                next_answer: Duration::from_secs(*patience_s),
            };
            let attempt: AnswerAttempt = if *udp { answers_datagram } else { accepts_connect };
            let answers = wait_for_answers(&range.addresses(), attempt, *sample, patience);
            println!("{}", serde_json::to_string(&answers)?);
        }
        ServiceMeasureCommand::Steady { range, every_us, millis } => {
            let (every, time) = (Duration::from_micros(*every_us), Duration::from_millis(*millis));
            let connects = connect_steadily(&range.addresses(), every, time);
            println!("{}", serde_json::to_string(&connects)?);
        }
    }
    Ok(())
}

impl ServiceRange {
    fn addresses(&self) -> Vec<SocketAddr> {
        let first = u32::from(self.first);
        let address = |number| IpAddr::V4(Ipv4Addr::from(first.wrapping_add(number)));
        (0..self.count).map(|number| SocketAddr::new(address(number), SERVICE_PORT)).collect()
    }
}

impl ReachedBackend {
    /// Returns the backend by the segment size that its client uses. TCP options may take some bytes of a segment.
    fn from_segment_size(size: u32) -> Self {
        let [first, second] = SEGMENT_SIZES.map(u32::from);
        if size <= first {
            Self::First
        } else if size <= second {
            Self::Second
        } else {
            Self::Other
        }
    }
}

/// Connects, and returns the segment size that the peer offers. The socket is reset at once, so that no port stays in
/// TIME_WAIT.
fn try_connect(addr: SocketAddr, timeout: Duration) -> io::Result<u32> {
    let stream = TcpStream::connect_timeout(&addr, timeout)?;
    let size = getsockopt(&stream, sockopt::TcpMaxSeg)?;
    // With a linger time of zero, close sends a reset.
    setsockopt(&stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })?;
    Ok(size)
}

fn accepts_connect(addr: SocketAddr) -> bool {
    try_connect(addr, UNSERVED_TIMEOUT).is_ok()
}

fn answers_datagram(addr: SocketAddr) -> bool {
    is_answered(addr, UNSERVED_TIMEOUT)
}

/// Prints each change until the process is killed or its reader is gone.
fn print_backend_changes(addr: SocketAddr, every: Duration) {
    let (mut reached, mut out) = (None, io::stdout().lock());
    loop {
        let begun = Instant::now();
        let backend = try_connect(addr, CONNECT_TIMEOUT)
            .map_or(ReachedBackend::Nothing, ReachedBackend::from_segment_size);
        let at_us = unix_us();
        if reached != Some(backend) {
            reached = Some(backend);
            let line = serde_json::to_string(&BackendChange { at_us, backend }).unwrap_or_default();
            if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
                return;
            }
        }
        // At a fixed pace, also if connects take long.
        if let Some(rest) = every.checked_sub(begun.elapsed()) {
            sh::sleep(rest);
        }
    }
}

/// Waits for all addresses.
///
/// Connects to all of them would take a processor from the process that is measured. So they begin when an evenly spread
/// sample answers. If each of the others then answers at its first attempt, the sample's last answer was the last one.
fn wait_for_answers(
    all: &[SocketAddr],
    attempt: AnswerAttempt,
    sample: usize,
    patience: ScanPatience,
) -> ServiceAnswers {
    let sample_size = sample.clamp(1, all.len().max(1));
    let sampled = (0..sample_size).filter_map(|index| {
        // The first and the last address are in the sample.
        let position = index * all.len().saturating_sub(1) / sample_size.saturating_sub(1).max(1);
        all.get(position).copied()
    });
    let sample_scan = scan_answers(sampled.collect(), attempt, patience);
    let rest = ScanPatience { first_answer: patience.next_answer, ..patience };
    let scan = scan_answers(all.to_vec(), attempt, rest);
    let last_us = match (sample_scan.missing.is_empty(), scan.last_late_us) {
        (true, None) => sample_scan.last_us,
        (true, late) => late.max(sample_scan.last_us),
        // An incomplete sample tells nothing of the others.
        (false, _) => scan.last_us,
    };
    ServiceAnswers {
        last_us: last_us.unwrap_or(0),
        answered: all.len() - scan.missing.len(),
        unanswered: scan.missing.len(),
    }
}

/// Attempts to reach all addresses until each has answered, or patience is over.
fn scan_answers(
    mut missing: Vec<SocketAddr>,
    attempt: AnswerAttempt,
    patience: ScanPatience,
) -> AnswerScan {
    let (mut last_us, mut last_late_us) = (None, None);
    let (mut waited_since, mut is_first_pass) = (Instant::now(), true);
    loop {
        let missing_before = missing.len();
        missing.retain(|addr| {
            let answers = attempt(*addr);
            if answers {
                last_us = Some(unix_us());
                // Answers of the first pass were there before: the pass itself takes time.
                last_late_us = if is_first_pass { None } else { last_us };
            }
            !answers
        });
        if missing.len() < missing_before {
            waited_since = Instant::now();
        }
        let longest = last_us.map_or(patience.first_answer, |_| patience.next_answer);
        if missing.is_empty() || waited_since.elapsed() > longest {
            return AnswerScan { missing, last_us, last_late_us };
        }
        is_first_pass = false;
        sh::sleep(ANSWER_PAUSE);
    }
}

/// Connects to the addresses in turn. A connect that is late begins at once, so the rate does not fall for long.
fn connect_steadily(all: &[SocketAddr], every: Duration, time: Duration) -> SteadyConnects {
    // Otherwise the kernel wakes this thread some 50 µs late, which would be a part of each time.
    let _less_precise = prctl::set_timerslack(1);
    let (started, mut times, mut failed) = (Instant::now(), Vec::new(), 0);
    for addr in all.iter().cycle() {
        let due = every * u32::try_from(times.len()).unwrap_or(u32::MAX);
        if due >= time {
            break;
        }
        if let Some(wait) = due.checked_sub(started.elapsed()) {
            sh::sleep(wait);
        }
        failed += usize::from(try_connect(*addr, CONNECT_TIMEOUT).is_err());
        times.push(started.elapsed().saturating_sub(due));
    }
    let MeasuredTimes { count: sent, p50_us, p99_us, .. } =
        MeasuredTimes::from_times(times, started.elapsed(), 0.0);
    SteadyConnects { sent, failed, p50_us, p99_us }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_backend_is_told_by_the_segment_size_that_it_offers() {
        let backend = |size| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            setsockopt(&listener, sockopt::TcpMaxSeg, &size).unwrap();
            let addr = listener.local_addr().unwrap();
            ReachedBackend::from_segment_size(try_connect(addr, CONNECT_TIMEOUT).unwrap())
        };
        let [first, second] = SEGMENT_SIZES.map(u32::from);
        let reached = [first, second, 4_000].map(backend);
        assert_eq!(reached, [ReachedBackend::First, ReachedBackend::Second, ReachedBackend::Other]);
    }

    #[test]
    fn services_that_never_answer_are_counted_and_end_the_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let served = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let at_once = Duration::ZERO;
        let patience = ScanPatience { first_answer: at_once, next_answer: at_once };
        let answers = wait_for_answers(&[served, closed, served], accepts_connect, 2, patience);
        assert_eq!((answers.answered, answers.unanswered), (2, 1));
        assert!(answers.last_us > 0);
        let none = wait_for_answers(&[closed], answers_datagram, 200, patience);
        assert_eq!(none, ServiceAnswers { last_us: 0, answered: 0, unanswered: 1 });
    }

    #[test]
    fn failed_connects_of_a_steady_rate_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let served = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let every = Duration::from_millis(1);
        let connects = connect_steadily(&[served, closed], every, every * 10);
        assert_eq!((connects.sent, connects.failed), (10, 5));
        assert!(connects.p50_us <= connects.p99_us, "{connects:?}");
    }

    #[test]
    fn a_range_of_services_has_consecutive_addresses() {
        let range = ServiceRange { first: Ipv4Addr::new(10, 96, 0, 255), count: 2 };
        let expected = ["10.96.0.255:80", "10.96.1.0:80"].map(|it| it.parse().unwrap());
        assert_eq!(range.addresses(), expected);
    }
}
