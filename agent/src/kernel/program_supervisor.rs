//! Shell: loads the eBPF programs, and verifies that they stay attached and work.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use common::{link::error_chain, once_signal::OnceSignal};
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    config::AgentConfig,
    incompatible::ForeignProgramOwner,
    kernel::{
        cgroup_search, freezer,
        locked_close::LockedCloser,
        map_op::KernelRoutes,
        maps::{KernelEventRing, KernelMaps},
        programs::{EbpfPrograms, EbpfProgramsError},
        takeover_stage::ProgramTakeoverStage,
    },
    metrics::{AgentMetrics, NotReadyReasons},
    paths::AgentPaths,
};

/// Period in which the attachments are verified: a cgroup that was removed and made again has lost its programs.
const VERIFY_PERIOD: Duration = Duration::from_secs(1);
/// Period in which a self-test proves that the programs work.
const SELF_TEST_PERIOD: Duration = Duration::from_secs(30);
/// Period in which a named but missing cgroup is looked up at start.
const CGROUP_POLL_PERIOD: Duration = Duration::from_millis(20);
/// Period in which a cgroup without a given name is searched: a search reads the whole hierarchy.
const CGROUP_SEARCH_PERIOD: Duration = Duration::from_millis(500);

/// Loaded eBPF programs, and the state that verifies them.
pub(crate) struct ProgramSupervisor {
    programs: EbpfPrograms,
    maps: KernelMaps,
    /// Foreign programs that were found on the same hooks, by owner.
    foreign_programs: BTreeMap<ForeignProgramOwner, usize>,
    /// Set once connects follow this agent's filled tables, as a self-test has proven.
    in_force: OnceSignal,
    /// Routes that connects follow, if these are in maps of other sizes.
    earlier_routes: Option<KernelRoutes>,
}

/// Waits for the cgroups, then loads and attaches the programs and opens the maps.
///
/// If an activator's namespace is given, one listener serves all services' ports there. There is no [`LockedCloser`] if
/// the kernel cannot close connections under their locks.
pub(crate) async fn start(
    config: &AgentConfig,
    not_ready: &NotReadyReasons,
) -> Result<
    (AgentPaths, (ProgramSupervisor, KernelMaps, KernelEventRing, Option<LockedCloser>)),
    EbpfProgramsError,
> {
    let paths = wait_for_cgroups(config, not_ready).await;
    let (activator_netns, loaded_paths) = (config.activator_netns.clone(), paths.clone());
    let load = move || {
        // First: requests may wait at pods that an earlier agent has frozen, and loading takes its time.
        freezer::thaw_all(&paths.pods);
        let mut programs = EbpfPrograms::load(paths)?;
        programs.find_kubelet();
        if let Some(netns) = activator_netns {
            programs.serve_ports(&netns)?;
        }
        let pins = programs.pins();
        let (maps, events) = (
            KernelMaps::open(&pins)?.with_previous(programs.previous_pins()),
            KernelEventRing::open(&pins)?,
        );
        let locked_closer = programs.take_locked_closer();
        let earlier_routes = programs.earlier_tables().and_then(read_earlier_routes);
        // The supervisor has maps of its own: its self-test runs on another thread than the loop's writes.
        let kernel = ProgramSupervisor {
            programs,
            maps: KernelMaps::open(&pins)?,
            foreign_programs: BTreeMap::new(),
            in_force: OnceSignal::new(),
            earlier_routes,
        };
        Ok((kernel, maps, events, locked_closer))
    };
    match spawn_blocking(load).await {
        Ok(loaded) => loaded.map(|loaded| (loaded_paths, loaded)),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Returns the routes in maps of other sizes. Without them, connects follow those maps for a while longer.
fn read_earlier_routes(pins: &Path) -> Option<KernelRoutes> {
    let read = KernelMaps::open(pins).and_then(|maps| maps.read_routes());
    let read = read.inspect_err(|error| {
        let error = error_chain(error);
        warn!(pins = %pins.display(), error, "cannot read the lists of the earlier maps");
    });
    read.ok()
}

/// Waits until the cgroups exist: the local node and the kubelet make them when they start, which may be later.
async fn wait_for_cgroups(config: &AgentConfig, not_ready: &NotReadyReasons) -> AgentPaths {
    let mut logged = None;
    loop {
        let (missing, pause) = match find_cgroups(config) {
            Ok(paths) => {
                not_ready.set("kernel", None);
                return paths;
            }
            Err(missing) => missing,
        };
        // A reason is logged when it appears, and not at each attempt.
        if logged.as_ref() != Some(&missing) {
            info!(reason = missing, "waiting for cgroups");
            not_ready.set("kernel", Some(missing.clone()));
            logged = Some(missing);
        }
        sleep(pause).await;
    }
}

/// Returns the cgroups; or the reason for which the agent waits for them, with the pause before the next search.
fn find_cgroups(config: &AgentConfig) -> Result<AgentPaths, (String, Duration)> {
    let Some(paths) = config.paths(None) else {
        let pods_cgroup = cgroup_search::find_pods_cgroup()
            .map_err(|unfound| (unfound.to_string(), CGROUP_SEARCH_PERIOD))?;
        info!(cgroup = %pods_cgroup.display(), "cgroup of this node's pods found");
        let unfound = || ("the cgroup of the pods is not known".to_owned(), CGROUP_SEARCH_PERIOD);
        return config.paths(Some(pods_cgroup)).ok_or_else(unfound);
    };
    // Cgroups that settings name are not searched for; they only have to exist.
    for cgroup in [&paths.clients, &paths.pods] {
        if !cgroup.is_dir() {
            return Err((
                format!("cgroup {} does not exist yet", cgroup.display()),
                CGROUP_POLL_PERIOD,
            ));
        }
    }
    Ok(paths)
}

impl ProgramSupervisor {
    /// Returns a signal that is set once connects follow this agent's filled tables, as a self-test has proven.
    pub(crate) fn in_force(&self) -> OnceSignal {
        self.in_force.clone()
    }

    /// Takes the routes that connects follow, if these are in maps of the same version with other sizes.
    pub(crate) fn take_earlier_routes(&mut self) -> Option<KernelRoutes> {
        self.earlier_routes.take()
    }

    /// Keeps the programs attached and verified until `shutdown`.
    pub(crate) async fn run(
        mut self,
        mut stage: watch::Receiver<ProgramTakeoverStage>,
        not_ready: NotReadyReasons,
        metrics: AgentMetrics,
        shutdown: CancellationToken,
    ) {
        let mut next_self_test = Instant::now();
        let mut is_proven = false;
        loop {
            let self_test_due = Instant::now() >= next_self_test;
            let current_stage = *stage.borrow_and_update();
            // Blocking calls: the programs move into the job and come back with its result.
            let check = spawn_blocking(move || {
                let followed_previous = self.programs.follows_previous();
                self.advance_takeover(current_stage);
                // Programs that have just taken over are proven at once.
                let took_over = followed_previous && !self.programs.follows_previous();
                let self_test_result = self.verify_programs(self_test_due || took_over);
                (self, self_test_result)
            });
            let self_test_result;
            (self, self_test_result) = match check.await {
                Ok(checked) => checked,
                Err(error) => return error!(%error, "the watch over the eBPF programs has ended"),
            };
            if self_test_due {
                metrics.set_foreign_programs(&self.foreign_programs);
            }
            if let Some(failure) = self_test_result {
                // A self-test that failed runs again at the next check.
                let period = if failure.is_some() { VERIFY_PERIOD } else { SELF_TEST_PERIOD };
                next_self_test = Instant::now() + period;
                // The self-test proves nothing of these programs while connects follow other ones.
                is_proven = failure.is_none() && !self.programs.follows_previous();
                not_ready.set("kernel", failure);
            }
            if is_proven && current_stage >= ProgramTakeoverStage::TablesFilled {
                self.in_force.set();
            }
            tokio::select! {
                () = sleep(VERIFY_PERIOD) => {}
                Ok(()) = stage.changed() => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Logs the owners of foreign programs on the same hooks, once for each change.
    fn log_foreign_programs(&mut self) {
        let foreign_programs = self.programs.foreign_programs();
        if foreign_programs != self.foreign_programs {
            for (owner, programs) in &foreign_programs {
                info!(owner = owner.name(), programs, "another's programs redirect connects too");
            }
            self.foreign_programs = foreign_programs;
        }
    }

    /// Takes over from another version's programs up to this stage. A failure is tried again at the next check.
    fn advance_takeover(&mut self, stage: ProgramTakeoverStage) {
        let done = match stage {
            ProgramTakeoverStage::TablesEmpty => Ok(()),
            ProgramTakeoverStage::TablesFilled => self.programs.take_over(),
            ProgramTakeoverStage::OldIdle => self.programs.retire_previous(),
        };
        if let Err(error) = done {
            warn!(error = %error_chain(&error), "cannot take over from another version's programs");
        }
    }

    /// Attaches programs that were lost, and records for them whether the kubelet is marked. Runs the self-test if it
    /// is due. Returns the failure of the self-test; the outer `None` means that it did not run.
    #[expect(clippy::option_option, reason = "a self-test that did not run has not succeeded")]
    fn verify_programs(&mut self, self_test_due: bool) -> Option<Option<String>> {
        let attached = self.programs.keep_attached();
        match &attached {
            Ok(0) => {}
            Ok(count) => {
                warn!(
                    programs = count,
                    "attached again: a cgroup or namespace had been created again"
                )
            }
            Err(error) => {
                warn!(error = %error_chain(error), "cannot keep the eBPF programs attached");
                // Without its programs a node is not ready, whatever a self-test would find.
                return Some(Some(error_chain(error)));
            }
        }
        self.maps.set_kubelet_marked(self.programs.is_kubelet_marked());
        // Programs that were just attached again are proven at once.
        let were_lost = attached.is_ok_and(|count| count > 0);
        if !self_test_due && !were_lost {
            return None;
        }
        self.programs.remove_outlived_pins();
        self.programs.find_kubelet();
        self.log_foreign_programs();
        let result = self.programs.verify_by_self_test(&mut self.maps);
        let failure = result.err().map(|error| error_chain(&error));
        if let Some(failure) = &failure {
            error!(trouble = failure, "self-test failed");
        }
        Some(failure)
    }
}
