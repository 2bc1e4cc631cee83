//! Shell: time from the event of a changed EndpointSlice until connects reach the Service's new backend.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    net::Ipv4Addr,
    process::{Child, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::{
    objects::{SWITCHED_BACKENDS, SWITCHED_SERVICE, cluster_ip, switched_slice},
    proxy::{ProxySubject, RunningProxy},
};
use crate::{
    bench::report::{BenchGoal, BenchRow, case_row},
    measure::service_connects::{BackendChange, ReachedBackend, SERVICE_PORT},
    sh,
};

/// Number of measured flips in one round of a subject: at 15 rounds more than a hundred.
const FLIPS_PER_ROUND: u32 = 7;
/// Pause between two connects, in µs. It bounds the precision of all figures.
const CONNECT_PERIOD_US: &str = "100";
/// Longest pause before a flip. It is kube-proxy's default time between two syncs, so that flips meet each moment of it
/// equally often.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Timeout for connects to follow a flip.
const FLIP_TIMEOUT: Duration = Duration::from_secs(60);
/// Fractional part of the golden ratio: its multiples, modulo 1, spread evenly from the first ones on.
const GOLDEN_RATIO: f64 = 0.618_033_988_749_895;

/// Times of one subject's flips, in ms.
#[derive(Debug, Default)]
struct FlipTimes {
    /// From the begin of the API server's write.
    from_event: Vec<f64>,
    /// From the end of this write, when the proxy's socket has the event.
    from_receipt: Vec<f64>,
    /// Number of changes that no flip explains: failed connects, and connects to the old backend after the new one.
    unexplained: usize,
}

/// A client that connects again and again, and the changes that it sees.
#[derive(Debug)]
pub(super) struct BackendWatch {
    client: Child,
    changes: mpsc::Receiver<BackendChange>,
}

/// Measures flips of all subjects in turn. Only the measured one runs.
pub(super) fn measure(proxies: &mut [RunningProxy], rounds: u32) -> Result<Vec<BenchRow>> {
    let mut times: BTreeMap<ProxySubject, FlipTimes> = BTreeMap::new();
    let services = proxies.first().map_or(0, |proxy| proxy.set.services);
    for round in 0..rounds {
        for offset in 0..proxies.len() {
            // Rotation keeps a drift within rounds from favouring one subject.
            let index = (round as usize + offset) % proxies.len();
            let proxy = &mut proxies[index];
            let subject = proxy.subject;
            let times = times.entry(subject).or_default();
            proxy
                .while_running(|proxy| measure_round(proxy, round, times))
                .with_context(|| format!("{} with {services} services", subject.name()))?;
        }
    }
    Ok(times.iter().flat_map(|(subject, times)| rows(services, *subject, times)).collect())
}

fn rows(services: u32, subject: ProxySubject, times: &FlipTimes) -> Vec<BenchRow> {
    let (case, name) = (format!("flip_{services}"), subject.name());
    let is_rouse = subject == ProxySubject::Rouse;
    let goal = |goal| if is_rouse { goal } else { BenchGoal::None };
    let unexplained = [times.unexplained as f64];
    let mut rows = vec![
        case_row(&case, name, "ms", &times.from_event, BenchGoal::None),
        case_row(
            &format!("{case}_unexplained"),
            name,
            "changes",
            &unexplained,
            goal(BenchGoal::AtMost(0.0)),
        ),
    ];
    if is_rouse {
        let goal = BenchGoal::P99AtMost(1.0);
        let case = format!("{case}_received");
        rows.insert(1, case_row(&case, name, "ms", &times.from_receipt, goal));
    }
    rows
}

/// Flips the backend [`FLIPS_PER_ROUND`] times, after one flip that is not measured.
fn measure_round(proxy: &RunningProxy, round: u32, times: &mut FlipTimes) -> Result<()> {
    let watch = BackendWatch::start(proxy, CONNECT_PERIOD_US)?;
    let mut present = watch.first_backend()?;
    for flip in 0..=FLIPS_PER_ROUND {
        let (expected, address) = other_backend(present)?;
        let number = round * (FLIPS_PER_ROUND + 1) + flip;
        sh::sleep(MAX_PAUSE.mul_f64((f64::from(number) * GOLDEN_RATIO).fract()));
        let event = proxy.server.set(switched_slice(address))?;
        let (change, unexplained) = watch.wait_for(expected, event.begun_us)?;
        present = expected;
        // The first one finds cold caches: the process was suspended.
        if flip > 0 {
            let ms_since = |us: u64| change.at_us.saturating_sub(us) as f64 / 1e3;
            times.from_event.push(ms_since(event.begun_us));
            times.from_receipt.push(ms_since(event.received_us));
        }
        times.unexplained += unexplained;
    }
    Ok(())
}

/// Returns the backend to flip to, with its address.
pub(super) fn other_backend(present: ReachedBackend) -> Result<(ReachedBackend, Ipv4Addr)> {
    match present {
        ReachedBackend::First => Ok((ReachedBackend::Second, SWITCHED_BACKENDS[1])),
        ReachedBackend::Second => Ok((ReachedBackend::First, SWITCHED_BACKENDS[0])),
        ReachedBackend::Other | ReachedBackend::Nothing => {
            bail!("connects to the Service reach no backend of it: {present:?}")
        }
    }
}

impl BackendWatch {
    /// Starts a client that connects once in each `period_us`.
    pub(super) fn start(proxy: &RunningProxy, period_us: &str) -> Result<Self> {
        let address = format!("{}:{SERVICE_PORT}", cluster_ip(SWITCHED_SERVICE));
        let args = ["backends", "--addr", &address, "--every-us", period_us];
        let mut client = proxy.services_command(&args);
        let mut client = client.stdout(Stdio::piped()).spawn().context("cannot start a client")?;
        let lines = BufReader::new(client.stdout.take().context("its output was piped")?).lines();
        let (sender, changes) = mpsc::channel();
        thread::spawn(move || {
            let lines = lines.map_while(Result::ok);
            for change in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                // The measurement is over.
                if sender.send(change).is_err() {
                    return;
                }
            }
        });
        Ok(Self { client, changes })
    }

    /// Waits for the first connect, and returns the backend that it reached.
    pub(super) fn first_backend(&self) -> Result<ReachedBackend> {
        let change = self.changes.recv_timeout(FLIP_TIMEOUT).context("a client never connected")?;
        Ok(change.backend)
    }

    /// Waits until connects reach `expected`, after `since_us`. Returns this change, and the number of other ones.
    pub(super) fn wait_for(
        &self,
        expected: ReachedBackend,
        since_us: u64,
    ) -> Result<(BackendChange, usize)> {
        let mut unexplained = 0;
        loop {
            let change = self.changes.recv_timeout(FLIP_TIMEOUT).with_context(|| {
                format!("connects have not followed a change to {expected:?} in {FLIP_TIMEOUT:?}")
            })?;
            if change.backend == expected && change.at_us >= since_us {
                return Ok((change, unexplained));
            }
            // A change to anything else, such as a refused connect in between, is a fault of the proxy.
            unexplained += 1;
        }
    }
}

impl Drop for BackendWatch {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times() -> FlipTimes {
        FlipTimes { from_event: vec![0.9, 1.2], from_receipt: vec![0.8, 0.9], unexplained: 1 }
    }

    #[test]
    fn rouse_is_judged_from_the_receipt_of_the_event() {
        let rows = rows(1_000, ProxySubject::Rouse, &times());
        let judged: Vec<_> = rows.iter().map(|row| (row.case.as_str(), row.reached)).collect();
        assert_eq!(
            judged,
            [
                ("flip_1000", None),
                ("flip_1000_received", Some(true)),
                ("flip_1000_unexplained", Some(false)),
            ]
        );
    }

    #[test]
    fn kube_proxy_has_no_goals() {
        let rows = rows(100, ProxySubject::Nftables, &times());
        assert!(rows.iter().all(|row| row.goal.is_none()), "{rows:?}");
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn a_flip_needs_a_backend_to_leave() {
        assert_eq!(other_backend(ReachedBackend::First).unwrap().0, ReachedBackend::Second);
        let error = other_backend(ReachedBackend::Nothing).unwrap_err().to_string();
        assert!(error.contains("Nothing"), "{error}");
    }
}
