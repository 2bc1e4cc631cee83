//! Pure: ConfigMaps → the settings in force, and everything that follows from them.

use std::sync::Arc;

use common::wire::{self, Name, RouteChange, RouteKey};
use serde_json::Value;
use tracing::{info, warn};

use super::{Machine, Said};
use crate::{
    children,
    config_maps::{self, Flag, deployment::Affinity},
    plan::Templates,
    policy::AutoscalerConfig,
    want,
    world::{Platform, Settings, Stamp},
};

/// What people should read on a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigNews {
    /// The ConfigMap.
    pub name: Name,
    /// Its UID; empty once it is gone.
    pub uid: String,
    /// What.
    pub event: config_maps::Event,
}

/// Apps whose objects are looked at together after a change of settings: 100 a second.
const AT_ONCE: usize = 10;
/// Until the next ones.
const PAUSE_MS: u64 = 100;
/// The timer of that; no app is called so.
pub(super) const REWRITE: Name = Name::EMPTY;

impl Machine {
    /// A ConfigMap as it is now. Only those of our own namespace set anything.
    pub(super) fn observe_config(&mut self, name: &Name, object: Option<&Value>, now: Stamp) {
        if name.namespace != self.world.settings.namespace {
            return;
        }
        let mut settings = Settings::clone(&self.world.settings);
        let update = settings.configs.observe(&name.name, object);
        let mut fresh = Vec::new();
        for event in update.events {
            let (reason, message) = (event.reason, event.message.as_str());
            if event.is_warning {
                warn!(config_map = name.name.as_str(), reason, message, "config map");
            } else {
                info!(config_map = name.name.as_str(), reason, message, "config map");
            }
            let uid = object.and_then(|it| it["metadata"]["uid"].as_str());
            let uid = uid.unwrap_or_default().to_owned();
            fresh.push(ConfigNews { name: name.clone(), uid, event });
        }
        if self.world.leads {
            self.effects.news.extend(fresh);
        } else {
            // Whoever leads tells; what this replica knows counts once it does.
            fresh.retain(|it| it.event.is_warning);
            self.untold.insert(name.clone(), fresh);
        }
        settings.adopt();
        self.world.settings = Arc::new(settings);
        if update.is_changed {
            self.say_settings();
            // What templates say was read with the settings before.
            self.world.templates = Templates::default();
            let all: Vec<Name> = self.world.apps.keys().cloned().collect();
            for app in &all {
                self.settle(app, None, false, now);
            }
            self.settle_mappings(now);
            // Objects say what the settings were when they were made. Who does not lead names all once it does.
            if self.world.leads && self.world.settings.platform == Platform::Kubernetes {
                self.stale = all.into();
                self.rewrite(now);
            }
        }
    }

    /// Tells other parts what holds for all services, where that is not as usual.
    fn say_settings(&self) {
        match self.world.settings.said() {
            Some(it) => {
                self.routes.set(RouteKey::Settings, Said::of(&RouteChange::Settings(it)));
            }
            None => self.routes.remove(&RouteKey::Settings),
        }
    }

    /// Looks at the objects of some more apps, and at the rest a little later: a setting concerns every service there is.
    pub(super) fn rewrite(&mut self, now: Stamp) {
        for _ in 0..AT_ONCE {
            let Some(name) = self.stale.pop_front() else { return };
            if let Some(app) = self.world.apps.get(&name) {
                self.effects.keys.extend(want::keys(&name, app, &self.world));
            }
        }
        self.timers.insert((now.plus_ms(PAUSE_MS), REWRITE));
    }
}

impl Settings {
    /// What the RouteTable says of them.
    pub(super) fn said(&self) -> Option<wire::Settings> {
        let request_log = self.configs.observability.request_log.clone();
        let edge = self.configs.network.edge.clone();
        wire::Settings { request_log, levels: self.configs.logging.levels(), edge }.said()
    }

    /// Takes over what the ConfigMaps say for scaling and for Deployments.
    fn adopt(&mut self) {
        let configs = &self.configs;
        let (deployment, defaults) = (&configs.deployment, &configs.defaults);
        self.autoscaler = AutoscalerConfig::clone(&configs.autoscaler);
        self.autoscaler.policy.progress_deadline = deployment.progress_deadline;
        let deadline = i32::try_from(deployment.progress_deadline.as_secs()).unwrap_or(i32::MAX);
        self.children = children::Config {
            progress_deadline_seconds: deadline,
            spread_over_nodes: deployment.affinity == Affinity::Spread,
            runtime_classes: deployment.runtime_classes(),
            service_links: defaults.enable_service_links,
            automount_token: defaults.automount_service_account_token,
            probe_any_port: configs.features.multi_container_probing == Flag::Enabled,
            wait_for_drain: self.children.wait_for_drain,
        };
    }
}

#[cfg(test)]
#[path = "settings/tests.rs"]
mod tests;
