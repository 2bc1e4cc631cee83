//! Shell: loads the eBPF programs, and verifies that they stay attached and work.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use common::link::error_chain;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    config::AgentConfig,
    incompatible::ForeignProgramOwner,
    kernel::{
        cgroup_search,
        locked_close::LockedCloser,
        maps::{KernelEventRing, KernelMaps},
        programs::{EbpfPrograms, EbpfProgramsError},
        takeover_stage::ProgramTakeoverStage,
    },
    metrics::{AgentMetrics, NotReadyReasons},
    paths::AgentPaths,
};

/// Period in which the attachments are verified: a cgroup that was removed and made again has lost its programs.
const VERIFY_PERIOD: Duration = Duration::from_secs(1);
/// Period in which a canary proves that the programs work.
const CANARY_PERIOD: Duration = Duration::from_secs(30);
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
}

/// Waits for the cgroups, then loads and attaches the programs and opens the maps.
///
/// If an activator's namespace is given, one listener serves all services' ports there. There is no [`LockedCloser`] if
/// the kernel cannot close connections under their locks.
pub(crate) async fn start(
    config: &AgentConfig,
    troubles: &NotReadyReasons,
) -> Result<
    (AgentPaths, (ProgramSupervisor, KernelMaps, KernelEventRing, Option<LockedCloser>)),
    EbpfProgramsError,
> {
    let places = wait_for_cgroups(config, troubles).await;
    let (activator_netns, found) = (config.activator_netns.clone(), places.clone());
    let load = move || {
        let mut programs = EbpfPrograms::load(places)?;
        programs.find_kubelet();
        if let Some(netns) = activator_netns {
            programs.serve_ports(&netns)?;
        }
        let pins = programs.pins();
        let (maps, events) = (
            KernelMaps::open(&pins)?.with_previous(programs.previous_pins()),
            KernelEventRing::open(&pins)?,
        );
        let ender = programs.take_locked_closer();
        // The watch has maps of its own: its canary runs on another thread than the loop's writes.
        let kernel = ProgramSupervisor {
            programs,
            maps: KernelMaps::open(&pins)?,
            foreign_programs: BTreeMap::new(),
        };
        Ok((kernel, maps, events, ender))
    };
    match spawn_blocking(load).await {
        Ok(loaded) => loaded.map(|loaded| (found, loaded)),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Waits until the cgroups exist: the local node and the kubelet make them when they start, which may be later.
async fn wait_for_cgroups(config: &AgentConfig, troubles: &NotReadyReasons) -> AgentPaths {
    let mut told = None;
    loop {
        let (waits, again) = match find_cgroups(config) {
            Ok(places) => {
                troubles.set("kernel", None);
                return places;
            }
            Err(waits) => waits,
        };
        if told.as_ref() != Some(&waits) {
            info!(reason = waits, "waiting for cgroups");
            troubles.set("kernel", Some(waits.clone()));
            told = Some(waits);
        }
        sleep(again).await;
    }
}

/// Returns the cgroups; or the reason for which the agent waits for them, with the pause before the next look.
fn find_cgroups(config: &AgentConfig) -> Result<AgentPaths, (String, Duration)> {
    let Some(places) = config.paths(None) else {
        let found = cgroup_search::find_pods_cgroup()
            .map_err(|unfound| (unfound.to_string(), CGROUP_SEARCH_PERIOD))?;
        info!(cgroup = %found.display(), "cgroup of this node's pods found");
        let unfound = || ("the cgroup of the pods is not known".to_owned(), CGROUP_SEARCH_PERIOD);
        return config.paths(Some(found)).ok_or_else(unfound);
    };
    // Cgroups that settings name are not searched for; they only have to exist.
    for cgroup in [&places.clients, &places.pods] {
        if !cgroup.is_dir() {
            return Err((
                format!("cgroup {} does not exist yet", cgroup.display()),
                CGROUP_POLL_PERIOD,
            ));
        }
    }
    Ok(places)
}

impl ProgramSupervisor {
    /// Keeps the programs attached and verified until `shutdown`.
    pub(crate) async fn run(
        mut self,
        mut stage: watch::Receiver<ProgramTakeoverStage>,
        troubles: NotReadyReasons,
        metrics: AgentMetrics,
        shutdown: CancellationToken,
    ) {
        let mut next_canary = Instant::now();
        loop {
            let due = Instant::now() >= next_canary;
            let now = *stage.borrow_and_update();
            // Blocking calls: the programs move into the job and come back with its result.
            let look = spawn_blocking(move || {
                self.advance_takeover(now);
                let healthy = self.verify_programs(due);
                (self, healthy)
            });
            let healthy;
            (self, healthy) = match look.await {
                Ok(looked) => looked,
                Err(error) => return error!(%error, "the watch over the eBPF programs has ended"),
            };
            if due {
                metrics.set_foreign_programs(&self.foreign_programs);
            }
            if let Some(trouble) = healthy {
                // A failed canary is sent again at the next look.
                next_canary =
                    Instant::now() + if trouble.is_some() { VERIFY_PERIOD } else { CANARY_PERIOD };
                troubles.set("kernel", trouble);
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
        let others = self.programs.foreign_programs();
        if others != self.foreign_programs {
            for (owner, programs) in &others {
                info!(owner = owner.name(), programs, "another's programs redirect connects too");
            }
            self.foreign_programs = others;
        }
    }

    /// Takes over from another version's programs up to this stage. A failure is tried again at the next look.
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

    /// Attaches programs that were lost and, if due, sends a canary. Returns the canary's failure; the outer `None`
    /// means that none was sent.
    #[expect(clippy::option_option, reason = "not asked is not the same as no trouble")]
    fn verify_programs(&mut self, canary_due: bool) -> Option<Option<String>> {
        let attached = self.programs.keep_attached();
        match &attached {
            Ok(0) => {}
            Ok(anew) => {
                warn!(
                    programs = anew,
                    "attached again: a cgroup or namespace had been created again"
                )
            }
            Err(error) => {
                warn!(error = %error_chain(error), "cannot keep the eBPF programs attached");
                return Some(Some(error_chain(error)));
            }
        }
        // Programs that were just attached again are proven at once.
        let lost = attached.is_ok_and(|anew| anew > 0);
        if !canary_due && !lost {
            return None;
        }
        self.programs.remove_outlived_pins();
        self.programs.find_kubelet();
        self.log_foreign_programs();
        let seen = self.programs.verify_by_canary(&mut self.maps);
        let trouble = seen.err().map(|error| error_chain(&error));
        if let Some(trouble) = &trouble {
            error!(trouble, "canary failed");
        }
        Some(trouble)
    }
}
