//! Shell: brings the kernel half into force and watches that it stays so.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use common::link::chain;
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    admin::Troubles,
    maps::{Events, Maps},
    programs::{Error, Places, Programs},
};

/// How often the cgroups are looked at: one that was removed and made again has lost its programs.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often a canary proves that the programs are in force.
const CANARY_EVERY: Duration = Duration::from_secs(30);
/// How often a missing cgroup is looked for at start.
const CGROUP_EVERY: Duration = Duration::from_millis(20);

/// The kernel half in force, and what proves it.
pub(crate) struct Kernel {
    programs: Programs,
    maps: Maps,
}

/// Waits for the cgroups, then loads, attaches and opens everything.
///
/// One listener serves all services' ports in `activator_netns`, where that is given.
pub(crate) async fn start(
    places: Places,
    activator_netns: Option<PathBuf>,
) -> Result<(Kernel, Maps, Events), Error> {
    wait_for_cgroups(&places).await;
    let load = move || {
        let mut programs = Programs::load(places)?;
        if let Some(netns) = activator_netns {
            programs.serve_ports(&netns)?;
        }
        let pins = programs.pins();
        let (maps, events) = (Maps::open(&pins)?, Events::open(&pins)?);
        let kernel = Kernel { programs, maps: Maps::open(&pins)? };
        Ok((kernel, maps, events))
    };
    match spawn_blocking(load).await {
        Ok(loaded) => loaded,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// The local node and the kubelet make their cgroups when they start, which may be later.
async fn wait_for_cgroups(places: &Places) {
    let mut told = false;
    while !(places.clients.is_dir() && places.pods.is_dir()) {
        if !std::mem::replace(&mut told, true) {
            info!(clients = %places.clients.display(), pods = %places.pods.display(), "waiting for cgroups");
        }
        sleep(CGROUP_EVERY).await;
    }
}

impl Kernel {
    /// Keeps the programs attached and proven until `shutdown`.
    pub(crate) async fn watch(mut self, troubles: Troubles, shutdown: CancellationToken) {
        let mut next_canary = Instant::now();
        loop {
            let due = Instant::now() >= next_canary;
            let look = spawn_blocking(move || {
                let healthy = self.look(due);
                (self, healthy)
            });
            let healthy;
            (self, healthy) = match look.await {
                Ok(looked) => looked,
                Err(error) => return error!(%error, "the watch over the kernel half has ended"),
            };
            if let Some(trouble) = healthy {
                // A canary that failed is sent again at the next look.
                next_canary =
                    Instant::now() + if trouble.is_some() { LOOK_EVERY } else { CANARY_EVERY };
                troubles.set("kernel", trouble);
            }
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                () = shutdown.cancelled() => return,
            }
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
        let seen = self.programs.canary(&mut self.maps);
        let trouble = seen.err().map(|error| chain(&error));
        if let Some(trouble) = &trouble {
            error!(trouble, "canary failed");
        }
        Some(trouble)
    }
}
