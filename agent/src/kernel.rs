//! Shell: brings the kernel half into force and watches that it stays so.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use common::link::chain;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    admin::{Metrics, Troubles},
    config::{Config, Places},
    kept::locked::Ender,
    kubepods,
    maps::{Events, Maps},
    oddities::Owner,
    programs::{Error, Programs},
};

/// How often the cgroups are looked at: one that was removed and made again has lost its programs.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often a canary proves that the programs are in force.
const CANARY_EVERY: Duration = Duration::from_secs(30);
/// How often a missing cgroup is looked for at start.
const CGROUP_EVERY: Duration = Duration::from_millis(20);
/// How often one whose name is not known is: all of the hierarchy is read for it.
const SEARCH_EVERY: Duration = Duration::from_millis(500);

/// How far this agent has got with taking over from another version's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The tables are not filled yet.
    #[default]
    Begun,
    /// Connects may follow them.
    Routed,
    /// Nothing is left that the other version's programs count.
    Counted,
}

/// The kernel half in force, and what proves it.
pub(crate) struct Kernel {
    programs: Programs,
    maps: Maps,
    /// Whose programs were seen beside ours.
    others: BTreeMap<Owner, usize>,
}

/// Waits for the cgroups, then loads, attaches and opens everything.
///
/// One listener serves all services' ports in the activator's namespace, where that is given. There is no [`Ender`] where
/// the kernel cannot end connections under their locks.
pub(crate) async fn start(
    config: &Config,
    troubles: &Troubles,
) -> Result<(Places, (Kernel, Maps, Events, Option<Ender>)), Error> {
    let places = wait_for_cgroups(config, troubles).await;
    let (activator_netns, found) = (config.activator_netns.clone(), places.clone());
    let load = move || {
        let mut programs = Programs::load(places)?;
        programs.find_kubelet();
        if let Some(netns) = activator_netns {
            programs.serve_ports(&netns)?;
        }
        let pins = programs.pins();
        let (maps, events) = (Maps::open(&pins)?.beside(programs.old()), Events::open(&pins)?);
        let ender = programs.take_ender();
        let kernel = Kernel { programs, maps: Maps::open(&pins)?, others: BTreeMap::new() };
        Ok((kernel, maps, events, ender))
    };
    match spawn_blocking(load).await {
        Ok(loaded) => loaded.map(|loaded| (found, loaded)),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// The local node and the kubelet make their cgroups when they start, which may be later.
async fn wait_for_cgroups(config: &Config, troubles: &Troubles) -> Places {
    let mut told = None;
    loop {
        let (waits, again) = match look_for_cgroups(config) {
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

/// Where the cgroups are, or why they are waited for, and until when to look again.
fn look_for_cgroups(config: &Config) -> Result<Places, (String, Duration)> {
    let Some(places) = config.places(None) else {
        let found = kubepods::find().map_err(|unfound| (unfound.to_string(), SEARCH_EVERY))?;
        info!(cgroup = %found.display(), "cgroup of this node's pods found");
        let unfound = || ("the cgroup of the pods is not known".to_owned(), SEARCH_EVERY);
        return config.places(Some(found)).ok_or_else(unfound);
    };
    for cgroup in [&places.clients, &places.pods] {
        if !cgroup.is_dir() {
            return Err((format!("cgroup {} does not exist yet", cgroup.display()), CGROUP_EVERY));
        }
    }
    Ok(places)
}

impl Kernel {
    /// Keeps the programs attached and proven until `shutdown`.
    pub(crate) async fn watch(
        mut self,
        mut stage: watch::Receiver<Stage>,
        troubles: Troubles,
        metrics: Metrics,
        shutdown: CancellationToken,
    ) {
        let mut next_canary = Instant::now();
        loop {
            let due = Instant::now() >= next_canary;
            let now = *stage.borrow_and_update();
            let look = spawn_blocking(move || {
                self.advance(now);
                let healthy = self.look(due);
                (self, healthy)
            });
            let healthy;
            (self, healthy) = match look.await {
                Ok(looked) => looked,
                Err(error) => return error!(%error, "the watch over the kernel half has ended"),
            };
            if due {
                metrics.beside(&self.others);
            }
            if let Some(trouble) = healthy {
                // A canary that failed is sent again at the next look.
                next_canary =
                    Instant::now() + if trouble.is_some() { LOOK_EVERY } else { CANARY_EVERY };
                troubles.set("kernel", trouble);
            }
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                Ok(()) = stage.changed() => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    /// Says once who else redirects connects here.
    fn look_around(&mut self) {
        let others = self.programs.others();
        if others != self.others {
            for (owner, programs) in &others {
                info!(owner = owner.name(), programs, "another's programs redirect connects too");
            }
            self.others = others;
        }
    }

    /// Takes over from another version's programs as far as the agent has got. What fails is tried again at the next look.
    fn advance(&mut self, stage: Stage) {
        let done = match stage {
            Stage::Begun => Ok(()),
            Stage::Routed => self.programs.take_over(),
            Stage::Counted => self.programs.retire_old(),
        };
        if let Err(error) = done {
            warn!(error = %chain(&error), "cannot take over from another version's programs");
        }
    }

    /// Attaches what was lost and, when due, sends a canary. Returns its trouble, `None` when none was sent.
    #[expect(clippy::option_option, reason = "not asked is not the same as no trouble")]
    fn look(&mut self, canary_due: bool) -> Option<Option<String>> {
        let attached = self.programs.keep_attached();
        match &attached {
            Ok(0) => {}
            Ok(anew) => {
                warn!(programs = anew, "attached again: a cgroup or namespace had been made anew")
            }
            Err(error) => {
                warn!(error = %chain(error), "cannot keep the kernel half attached");
                return Some(Some(chain(error)));
            }
        }
        let lost = attached.is_ok_and(|anew| anew > 0);
        if !canary_due && !lost {
            return None;
        }
        self.programs.remove_outlived();
        self.programs.find_kubelet();
        self.look_around();
        let seen = self.programs.canary(&mut self.maps);
        let trouble = seen.err().map(|error| chain(&error));
        if let Some(trouble) = &trouble {
            error!(trouble, "canary failed");
        }
        Some(trouble)
    }
}
