//! Shell: the measured pods, the attached programs, and single measurements.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use agent::{
    kernel::programs::{self, EbpfPrograms},
    paths::AgentPaths,
};
use anyhow::{Context as _, Result, ensure};

use crate::{
    cases::{CountBenchCase, CountBenchSubject, H2_STREAMS_ARE_COUNTED, UncountedSocket},
    cpu_usage::{CpuUsage, CycleCounter, has_cycles},
    empty_programs::EmptyPrograms,
    fixture::{KernelFixture, NetnsFixture, SERVING_PORT},
    load_generators::{CountBenchLoad, H2_CONNECTIONS, LoadSummary},
    nginx::{BenchNginx, OTHER_PORT, PROXY_PORT, sleep},
    program_costs::{self, ProgramCost},
};

/// Results of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountMeasurement {
    /// Number of requests by the server's count.
    pub(crate) requests: u64,
    pub(crate) per_s: f64,
    /// Processor time a request, in µs, of client, server, proxy and the packet processing between them.
    pub(crate) cpu_us: f64,
    /// Processor time a request of the whole machine, in µs.
    pub(crate) machine_us: f64,
    /// Processor cycles a request of the whole machine; `None` if it does not count them.
    pub(crate) cycles: Option<f64>,
}

/// A pod, its server, and the proxy beside it.
struct BenchServerPod {
    netns: NetnsFixture,
    nginx: BenchNginx,
    _sidecar: Option<BenchNginx>,
    registered: bool,
}

/// Protocol that a pod's server accepts from clients, and whether its requests are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BenchServerKind {
    CountedH1,
    CountedH2,
    /// HTTP/1.1, without a proxy.
    Uncounted,
}

pub(crate) struct CountBenchFixture {
    h1: BenchServerPod,
    h2: BenchServerPod,
    unregistered: BenchServerPod,
    foreign: BenchServerPod,
    client: NetnsFixture,
    pod_client: NetnsFixture,
    foreign_client: NetnsFixture,
    subject: CountBenchSubject,
    empty: Option<EmptyPrograms>,
    programs: Vec<(String, u32)>,
    /// Number of HTTP/2 requests that take as long as one measurement should.
    h2_requests: BTreeMap<CountBenchSubject, u64>,
    core: usize,
    seconds: u32,
    cycles: bool,
    /// Last field, so that it is dropped last: it removes the namespaces and cgroups of the others.
    fixture: KernelFixture,
}

impl CountBenchFixture {
    /// Builds the fixture, with the eBPF programs in `object` if given, else with those of this build.
    pub(crate) fn new(core: usize, seconds: u32, object: Option<&Path>) -> Result<Self> {
        let mut fixture = match object {
            None => KernelFixture::new(),
            Some(object) => {
                let bytes = fs::read(object).with_context(|| format!("no {}", object.display()))?;
                KernelFixture::with_programs(|paths| load_object(&bytes, paths))
            }
        };
        let folder = fixture.paths().bpffs.with_file_name("bench");
        let top = fixture.paths().clients.parent().context("no parent cgroup")?.to_owned();
        let outside = |mut netns: NetnsFixture| -> Result<NetnsFixture> {
            netns.cgroup = top.join(format!("foreign{}", netns.number));
            fs::create_dir_all(&netns.cgroup)?;
            Ok(netns)
        };
        let start =
            |netns: NetnsFixture, kind: BenchServerKind| start_server(netns, core, &folder, kind);
        let h1 = start(fixture.add_pod(), BenchServerKind::CountedH1)?;
        let h2 = start(fixture.add_pod(), BenchServerKind::CountedH2)?;
        let unregistered = start(fixture.add_pod(), BenchServerKind::Uncounted)?;
        let foreign = start(outside(fixture.add_client())?, BenchServerKind::Uncounted)?;
        fixture.register_pod(&h1.netns, 0);
        fixture.register_pod(&h2.netns, 0);
        let (client, pod_client) = (fixture.add_client(), fixture.add_pod());
        let foreign_client = outside(fixture.add_client())?;
        let programs = program_costs::pinned_programs(&links_directory(&fixture))?;
        Ok(Self {
            h1,
            h2,
            unregistered,
            foreign,
            client,
            pod_client,
            foreign_client,
            subject: CountBenchSubject::Rouse,
            empty: None,
            programs,
            h2_requests: BTreeMap::new(),
            core,
            seconds,
            cycles: has_cycles(),
            fixture,
        })
    }

    /// Measures a case with a subject in force.
    pub(crate) fn measure(
        &mut self,
        case: CountBenchCase,
        subject: CountBenchSubject,
    ) -> Result<CountMeasurement> {
        self.apply_subject(subject)?;
        let target = self.server_for(case);
        let from = &self.client;
        let port = if subject == CountBenchSubject::Sidecar { PROXY_PORT } else { SERVING_PORT };
        let (run, load) = self.run(case, target, from, port)?;
        if case == CountBenchCase::H2 {
            let per_run = load.per_s * f64::from(self.seconds);
            self.h2_requests.insert(subject, per_run as u64);
        }
        Ok(run)
    }

    /// Measures a case with the eBPF programs attached, and the time in each of them.
    pub(crate) fn profile(
        &mut self,
        case: CountBenchCase,
    ) -> Result<(CountMeasurement, Vec<ProgramCost>)> {
        self.apply_subject(CountBenchSubject::Rouse)?;
        let programs = self.programs.clone();
        program_costs::measure_run_time(&programs, || self.measure(case, CountBenchSubject::Rouse))
    }

    /// Measures the time that is recorded of empty programs.
    pub(crate) fn profile_empty(&mut self) -> Result<Vec<ProgramCost>> {
        self.apply_subject(CountBenchSubject::Empty)?;
        let programs = self.empty.as_ref().context("it is in force")?.program_ids()?;
        let (_, costs) = program_costs::measure_run_time(&programs, || {
            self.measure(CountBenchCase::H1, CountBenchSubject::Empty)
        })?;
        ensure!(
            costs.iter().all(|cost| cost.runs > 0),
            "the empty programs did not run: {costs:?}"
        );
        Ok(costs)
    }

    /// Counts packets of sockets that are not counted, and measures the time in programs meanwhile.
    pub(crate) fn profile_uncounted(
        &mut self,
        socket: UncountedSocket,
    ) -> Result<(u64, Vec<ProgramCost>)> {
        self.apply_subject(CountBenchSubject::Rouse)?;
        let (target, from, port) = match socket {
            UncountedSocket::Port => (&self.h1, &self.client, OTHER_PORT),
            UncountedSocket::Pod => (&self.unregistered, &self.client, SERVING_PORT),
            UncountedSocket::Client => (&self.foreign, &self.pod_client, SERVING_PORT),
            UncountedSocket::Foreign => (&self.foreign, &self.foreign_client, SERVING_PORT),
        };
        let end = if socket == UncountedSocket::Client { from } else { &target.netns };
        let before = tcp_segments(&end.netns)?;
        let (_, costs) = program_costs::measure_run_time(&self.programs, || {
            self.run(CountBenchCase::H1, target, from, port)
        })?;
        let segments = tcp_segments(&end.netns)? - before;
        let runs: u64 = costs
            .iter()
            .filter(|cost| program_costs::is_packet_program(&cost.name))
            .map(|cost| cost.runs)
            .sum();
        if socket == UncountedSocket::Foreign {
            ensure!(runs == 0, "programs ran for a pod where none is attached: {costs:?}");
        } else {
            ensure!(runs > 0, "no program ran: {costs:?}");
        }
        Ok((segments, costs))
    }

    fn server_for(&self, case: CountBenchCase) -> &BenchServerPod {
        match case {
            CountBenchCase::H1 | CountBenchCase::H1Browser | CountBenchCase::Bulk => &self.h1,
            CountBenchCase::H2 => &self.h2,
        }
    }

    fn run(
        &self,
        case: CountBenchCase,
        target: &BenchServerPod,
        from: &NetnsFixture,
        port: u16,
    ) -> Result<(CountMeasurement, LoadSummary)> {
        let before = target.nginx.settled_status()?;
        let counted_before = self.counted_requests(target);
        let load = CountBenchLoad {
            case,
            from,
            to: format!("{}:{port}", target.netns.ipv4()),
            core: self.core,
            seconds: self.seconds,
            requests: self.h2_requests.get(&self.subject).copied().unwrap_or(20_000),
        };
        let cycles = self.cycles.then(CycleCounter::start).transpose()?;
        let used_before = self.cpu_usage()?;
        let summary = load.run()?;
        let used = self.cpu_usage()?.since(used_before);
        let cycles = cycles.and_then(CycleCounter::stop);
        let requests = self.settled_requests(target)? - before.requests;
        let range = summary.requests..=summary.requests + summary.max_unreported;
        ensure!(range.contains(&requests), "nginx served {requests}, its client had {summary:?}");
        let is_counted =
            self.subject == CountBenchSubject::Rouse && target.registered && port == SERVING_PORT;
        let counted = self.counted_requests(target) - counted_before;
        self.assert_counted(case, if is_counted { requests } else { 0 }, counted)?;
        let per_request = |all: f64| all / requests as f64;
        let run = CountMeasurement {
            requests,
            per_s: summary.per_s,
            cpu_us: per_request(used.own_us),
            machine_us: per_request(used.machine_us),
            cycles: cycles.map(per_request),
        };
        Ok((run, summary))
    }

    /// Fails unless the programs counted what they should: a bench of inactive programs would be misleading.
    fn assert_counted(&self, case: CountBenchCase, served: u64, counted: u64) -> Result<()> {
        let expected = match case {
            CountBenchCase::H2 if !H2_STREAMS_ARE_COUNTED && served > 0 => {
                u64::from(H2_CONNECTIONS)
            }
            _ => served,
        };
        ensure!(
            counted == expected,
            "the eBPF programs counted {counted} requests, not {expected}"
        );
        Ok(())
    }

    /// Number of requests that the eBPF programs have counted in a pod.
    fn counted_requests(&self, target: &BenchServerPod) -> u64 {
        if !target.registered {
            return 0;
        }
        self.fixture.maps.totals(pod_slot(&target.netns)).finished
    }

    /// Number of served requests, once server and eBPF programs see no open connection.
    fn settled_requests(&self, target: &BenchServerPod) -> Result<u64> {
        let served = target.nginx.settled_status()?;
        if target.registered && self.subject == CountBenchSubject::Rouse {
            self.wait_closed(target)?;
        }
        Ok(served.requests)
    }

    /// Waits until the eBPF programs see no open connection either.
    fn wait_closed(&self, target: &BenchServerPod) -> Result<()> {
        let started = Instant::now();
        loop {
            let state = self.fixture.maps.pod_state(pod_slot(&target.netns));
            if state.connections == 0 && state.in_flight == 0 {
                ensure!(
                    state.desynced_connections == 0 && state.stray_responses == 0,
                    "boundaries were lost: {state:?}"
                );
                return Ok(());
            }
            ensure!(started.elapsed().as_secs() < 10, "it does not come to rest: {state:?}");
            sleep();
        }
    }

    fn cpu_usage(&self) -> Result<CpuUsage> {
        let top = self.fixture.paths().clients.parent().context("no parent cgroup")?;
        CpuUsage::read(top, self.core)
    }

    /// Puts a subject in force in place of the present one.
    fn apply_subject(&mut self, subject: CountBenchSubject) -> Result<()> {
        let (was_attached, is_attached) =
            (self.subject == CountBenchSubject::Rouse, subject == CountBenchSubject::Rouse);
        let programs = self.fixture.programs.as_ref().context("they are loaded")?;
        if was_attached && !is_attached {
            let links = links_directory(&self.fixture);
            fs::remove_dir_all(&links).context("cannot unpin the links")?;
            fs::create_dir(&links)?;
        }
        self.empty = match (subject, self.empty.take()) {
            (CountBenchSubject::Empty, Some(empty)) => Some(empty),
            (CountBenchSubject::Empty, None) => {
                Some(EmptyPrograms::attach(&self.fixture.paths().pods)?)
            }
            (CountBenchSubject::Off | CountBenchSubject::Rouse | CountBenchSubject::Sidecar, _) => {
                None
            }
        };
        if is_attached && !was_attached {
            let links = programs.keep_attached()?;
            ensure!(links == self.programs.len(), "only {links} programs were attached again");
        }
        self.subject = subject;
        Ok(())
    }
}

/// Loads an object from memory with the alignment that the ELF parser needs.
fn load_object(
    object: &[u8],
    paths: AgentPaths,
) -> Result<EbpfPrograms, programs::EbpfProgramsError> {
    let mut buffer = vec![0_u8; object.len() + 8];
    let offset = buffer.as_ptr().align_offset(8);
    let aligned = &mut buffer[offset..offset + object.len()];
    aligned.copy_from_slice(object);
    EbpfPrograms::load_object(aligned, paths)
}

/// Starts a pod's server, and a proxy beside it if the pod's requests are counted.
fn start_server(
    netns: NetnsFixture,
    core: usize,
    folder: &Path,
    kind: BenchServerKind,
) -> Result<BenchServerPod> {
    let h2 = kind == BenchServerKind::CountedH2;
    let registered = kind != BenchServerKind::Uncounted;
    let nginx = BenchNginx::server(&netns, core, folder, h2)?;
    let sidecar = registered.then(|| BenchNginx::sidecar(&netns, core, folder, h2)).transpose()?;
    Ok(BenchServerPod { netns, nginx, _sidecar: sidecar, registered })
}

fn pod_slot(netns: &NetnsFixture) -> u32 {
    u32::from(netns.number)
}

fn links_directory(fixture: &KernelFixture) -> PathBuf {
    fixture.paths().pins().join("links")
}

/// Number of TCP segments in and out of a network namespace so far.
fn tcp_segments(netns: &str) -> Result<u64> {
    let output = std::process::Command::new("ip")
        .args(["netns", "exec", netns, "cat", "/proc/net/snmp"])
        .output()?;
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    // The first line names the fields: InSegs and OutSegs are the tenth and eleventh.
    let line = output.lines().filter(|line| line.starts_with("Tcp:")).nth(1);
    let values: Vec<&str> = line.context("the kernel counts segments")?.split(' ').collect();
    Ok(values[10].parse::<u64>()? + values[11].parse::<u64>()?)
}
