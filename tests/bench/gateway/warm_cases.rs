//! Shell: cases with normal requests only: highest rates, latency at half of them, and latency beside slow clients.

use std::{cell::RefCell, collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tokio_util::sync::CancellationToken;

use crate::{
    cases::{AWAKE_HOST, GatewayCase, GatewayPort, GatewaySubject, ThroughputLoad},
    crowd::{CROWD_SIZE, ClientCrowd},
    figures::Figure,
    fixture::GatewayFixture,
    load_generators::LoadRun,
    open_loop::OpenLoop,
};

/// Number of requests of h2load before the rate of a subject is known.
const FIRST_H2_REQUESTS: u64 = 20_000;
/// Busy time of the proxy's core below which a rate says nothing, in seconds: ticks are 10 ms.
const MIN_BUSY_S: f64 = 0.1;
/// Connections of normal requests at a constant rate.
const NORMAL_CONNECTIONS: usize = 64;
/// Rate of normal requests beside slow clients: a fraction of what any of the proxies can do.
const NORMAL_PER_S: f64 = 4_000.0;

/// Measurements of the cases with normal requests.
#[derive(Debug)]
pub(crate) struct WarmCases<'a> {
    pub(crate) fixture: &'a GatewayFixture,
    /// Length of one measurement, in seconds.
    pub(crate) seconds: u32,
    /// Number of requests of h2load that take as long as one measurement should.
    pub(crate) h2_requests: RefCell<BTreeMap<(GatewayCase, GatewaySubject), u64>>,
}

impl WarmCases<'_> {
    /// Sends requests as fast as the subject answers.
    pub(crate) fn measure_rate(
        &self,
        case: GatewayCase,
        load: ThroughputLoad,
        subject: GatewaySubject,
    ) -> Result<Vec<Figure>> {
        let to = self.fixture.kept_address(subject)?;
        let grpc_message = self.fixture.grpc_message();
        let known = self.h2_requests.borrow().get(&(case, subject)).copied();
        let run = LoadRun {
            load,
            to,
            seconds: self.seconds,
            requests: known.unwrap_or(FIRST_H2_REQUESTS),
            grpc_message: &grpc_message,
        };
        let (cores, begin) = (self.fixture.cores, std::time::Instant::now());
        let before = cores.times()?;
        let summary = run.run()?;
        let used = cores.times()?.since(before);
        let elapsed_s = begin.elapsed().as_secs_f64();
        let next = (summary.per_s * f64::from(self.seconds)) as u64;
        self.h2_requests.borrow_mut().insert((case, subject), next.max(1_000));
        let mut figures = vec![
            ("req_s", summary.per_s),
            ("client_core_percent", used.client_s / elapsed_s * 100.0),
        ];
        if subject != GatewaySubject::Direct {
            let is_first = known.is_none();
            // The first run of h2load is short; its figures are dropped with the round that warms up.
            ensure!(
                is_first || used.proxy_s >= MIN_BUSY_S,
                "the proxy's core was busy for {} s only",
                used.proxy_s
            );
            figures.push(("req_s_core", summary.requests / used.proxy_s));
            figures.push(("proxy_core_percent", used.proxy_s / elapsed_s * 100.0));
        }
        Ok(figures)
    }

    /// Sends requests at half of the subject's own highest rate, which is measured first.
    pub(crate) fn measure_latency(&self, subject: GatewaySubject) -> Result<Vec<Figure>> {
        let load = GatewayCase::H1C64.throughput().context("the case measures a rate")?;
        let rate = self.measure_rate(GatewayCase::P99C64, load, subject)?;
        let highest = rate.iter().find(|(name, _)| *name == "req_s").map(|(_, rate)| *rate);
        let half = highest.context("a rate was measured")? / 2.0;
        let latencies = self.open_loop(subject, half)?.run()?;
        Ok(vec![("p99_us", latencies.p99_us()), ("req_s", half)])
    }

    /// Compares the latency of normal requests beside ten thousand slow clients with that of a quiet run before.
    pub(crate) fn measure_slow_clients(&self, subject: GatewaySubject) -> Result<Vec<Figure>> {
        let normal = self.open_loop(subject, NORMAL_PER_S)?;
        let quiet = normal.run()?;
        let crowd = self.fixture.runtime.block_on(ClientCrowd::connect(normal.to))?;
        let stop = CancellationToken::new();
        let slow = self.fixture.runtime.spawn(crowd.trickle(AWAKE_HOST, stop.clone()));
        let beside = normal.run();
        // The slow clients end before a failure of the normal ones is passed on.
        stop.cancel();
        let closed = self.fixture.runtime.block_on(slow).context("the slow clients panicked")??;
        let beside = beside?;
        ensure!(closed == 0, "{closed} of {CROWD_SIZE} slow clients were cut off");
        Ok(vec![
            ("p99_us", beside.p99_us()),
            ("quiet_p99_us", quiet.p99_us()),
            ("ratio", beside.p99_us() / quiet.p99_us()),
        ])
    }

    fn open_loop(&self, subject: GatewaySubject, per_s: f64) -> Result<OpenLoop> {
        Ok(OpenLoop {
            to: GatewayPort::H1.at(self.fixture.kept_address(subject)?),
            host: AWAKE_HOST,
            connections: NORMAL_CONNECTIONS,
            per_s,
            length: Duration::from_secs(self.seconds.into()),
        })
    }
}
