//! Pure: ConfigMaps → present settings, with all changes that follow from them.

use std::sync::Arc;

use common::wire::{self, NamespacedName, RouteChange, RouteKey};
use serde_json::Value;
use tracing::{info, warn};

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    children,
    config_maps::{self, Flag, deployment::DefaultAffinityType},
    plan::TemplateCache,
    policy::ScalePolicyConfig,
    want,
    world::{ControllerSettings, PlatformKind, UnixMillis},
};

/// Event to record on a ConfigMap, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMapEventRecord {
    /// Namespace and name of the ConfigMap.
    pub name: NamespacedName,
    /// UID of the ConfigMap; empty once it is deleted.
    pub uid: String,
    /// Type, reason and message of the Event.
    pub event: config_maps::ConfigMapEvent,
}

/// Number of apps whose objects are checked together after a change of settings: 100 per second in all.
const AT_ONCE: usize = 10;
/// Milliseconds until the next apps are checked.
const PAUSE_MS: u64 = 100;
/// Name of the timer for the next apps, which no app can have.
pub(super) const REWRITE: NamespacedName = NamespacedName::EMPTY;

impl ControllerStateMachine {
    /// Handles a ConfigMap. Only those of the system namespace have an effect.
    pub(super) fn observe_config(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        if name.namespace != self.world.settings.namespace {
            return;
        }
        let mut settings = ControllerSettings::clone(&self.world.settings);
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
            fresh.push(ConfigMapEventRecord { name: name.clone(), uid, event });
        }
        if self.world.leads {
            self.effects.news.extend(fresh);
        } else {
            // The leader records Events; this replica records its warnings if it becomes the leader.
            fresh.retain(|it| it.event.is_warning);
            self.untold.insert(name.clone(), fresh);
        }
        settings.adopt();
        self.world.settings = Arc::new(settings);
        if update.is_changed {
            self.say_settings();
            // Templates were parsed with the old settings.
            self.world.templates = TemplateCache::default();
            let all: Vec<NamespacedName> = self.world.apps.keys().cloned().collect();
            for app in &all {
                self.settle(app, None, false, now);
            }
            self.settle_mappings(now);
            // Objects reflect the settings at the time of their creation. A replica that becomes the leader names all
            // of them.
            if self.world.leads && self.world.settings.platform == PlatformKind::Kubernetes {
                self.stale = all.into();
                self.rewrite(now);
            }
        }
    }

    /// Updates the settings for all services in the RouteTable, or removes them if all are defaults.
    fn say_settings(&self) {
        match self.world.settings.said() {
            Some(it) => {
                self.routes
                    .set(RouteKey::Settings, RouteFingerprint::of(&RouteChange::Settings(it)));
            }
            None => self.routes.remove(&RouteKey::Settings),
        }
    }

    /// Names the objects of some more apps, and sets a timer for the rest: a setting concerns every service.
    pub(super) fn rewrite(&mut self, now: UnixMillis) {
        for _ in 0..AT_ONCE {
            let Some(name) = self.stale.pop_front() else { return };
            if let Some(app) = self.world.apps.get(&name) {
                self.effects.keys.extend(want::keys(&name, app, &self.world));
            }
        }
        self.timers.insert((now.plus_ms(PAUSE_MS), REWRITE));
    }
}

impl ControllerSettings {
    /// Returns the settings as the RouteTable contains them; `None`: all are defaults.
    pub(super) fn said(&self) -> Option<wire::GlobalSettings> {
        let request_log = self.configs.observability.request_log.clone();
        let edge = self.configs.network.edge.clone();
        wire::GlobalSettings { request_log, levels: self.configs.logging.levels(), edge }.said()
    }

    /// Derives the settings of scaling and of Deployments from the ConfigMaps.
    fn adopt(&mut self) {
        let configs = &self.configs;
        let (deployment, defaults) = (&configs.deployment, &configs.defaults);
        self.autoscaler = ScalePolicyConfig::clone(&configs.autoscaler);
        self.autoscaler.policy.progress_deadline = deployment.progress_deadline;
        let deadline = i32::try_from(deployment.progress_deadline.as_secs()).unwrap_or(i32::MAX);
        self.children = children::DeploymentSettings {
            progress_deadline_seconds: deadline,
            spread_over_nodes: deployment.affinity == DefaultAffinityType::Spread,
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
