//! Pure: ConfigMaps → settings in force, and all changes that follow from them.

use std::sync::Arc;

use common::wire::{self, NamespacedName, RouteChange, RouteKey};
use serde_json::Value;
use tracing::{info, warn};

use super::{ControllerStateMachine, RouteFingerprint};
use crate::{
    decide::part_keys,
    model::{
        cluster_state::{
            ControllerSettings, DeploymentSettings, PlatformKind, TemplateCache, UnixMillis,
            name_registry::PORT_RECORD_NAME,
        },
        config_maps::{self, Flag, deployment::DefaultAffinityType},
        scale_policy::ScalePolicyConfig,
    },
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
const REWRITE_BATCH: usize = 10;
/// Milliseconds until the next apps are checked.
const REWRITE_INTERVAL_MS: u64 = 100;
/// Key of the timer for the next batch: the empty name, which no app has.
pub(super) const REWRITE_TIMER_KEY: NamespacedName = NamespacedName::EMPTY;

impl ControllerStateMachine {
    /// Handles a ConfigMap. Only those of the system namespace have an effect.
    pub(super) fn observe_config_map(
        &mut self,
        name: &NamespacedName,
        object: Option<&Value>,
        now: UnixMillis,
    ) {
        if name.namespace != self.cluster.settings.system_namespace {
            return;
        }
        if name.name == PORT_RECORD_NAME {
            return self.observe_port_record(object);
        }
        let mut settings = ControllerSettings::clone(&self.cluster.settings);
        let update = settings.config_maps.observe(&name.name, object);
        let mut new_records = Vec::new();
        for event in update.events {
            let (reason, message) = (event.reason, event.message.as_str());
            if event.is_warning {
                warn!(config_map = name.name.as_str(), reason, message, "config map");
            } else {
                info!(config_map = name.name.as_str(), reason, message, "config map");
            }
            let uid = object.and_then(|it| it["metadata"]["uid"].as_str());
            let uid = uid.unwrap_or_default().to_owned();
            new_records.push(ConfigMapEventRecord { name: name.clone(), uid, event });
        }
        if self.cluster.is_leader {
            self.effects.config_map_events.extend(new_records);
        } else if update.has_new_data {
            // The leader records Events; this replica records its warnings if it becomes the leader. They hold while
            // the data are the same, also if a watch that begins again repeats the object.
            new_records.retain(|it| it.event.is_warning);
            self.unrecorded_events.insert(name.clone(), new_records);
        }
        settings.apply_config_maps();
        self.cluster.settings = Arc::new(settings);
        if update.is_changed {
            // All mappings and their targets are planned below.
            let _planned_below = self.update_named_secrets(now);
            self.update_settings_route();
            // Templates were parsed with the old settings.
            self.cluster.template_cache = TemplateCache::default();
            let all: Vec<NamespacedName> = self.cluster.apps.keys().cloned().collect();
            for app in &all {
                self.reconcile_app(app, now);
            }
            self.reconcile_all_mappings(now);
            self.check_requests();
            // Objects reflect the settings at the time of their creation, so all are checked. Other replicas check all
            // objects when they become the leader.
            if self.cluster.is_leader && self.cluster.settings.platform == PlatformKind::Kubernetes
            {
                self.apps_to_rewrite = all.into();
                // With a timer, an earlier change is on its way, and the timer goes on with the new list.
                if !self.timers.is_set(&REWRITE_TIMER_KEY) {
                    self.rewrite_next_apps(now);
                }
            }
        }
    }

    /// Updates the settings for all services in the RouteTable, or removes them if all are defaults.
    fn update_settings_route(&self) {
        match self.cluster.settings.route_settings() {
            Some(it) => {
                self.routes.set(
                    RouteKey::Settings,
                    RouteFingerprint::of_change(&RouteChange::Settings(it)),
                );
            }
            None => self.routes.remove(&RouteKey::Settings),
        }
    }

    /// Passes the keys of the next apps' objects to the writer, which checks them. Sets a timer for the rest: a setting
    /// may concern every service, and all objects at once would be too many.
    pub(super) fn rewrite_next_apps(&mut self, now: UnixMillis) {
        for _ in 0..REWRITE_BATCH {
            let Some(name) = self.apps_to_rewrite.pop_front() else { return };
            if let Some(app) = self.cluster.apps.get(&name) {
                self.effects.changed_keys.extend(part_keys::app_keys(&name, app, &self.cluster));
            }
        }
        self.timers.set(&REWRITE_TIMER_KEY, Some(now.plus_ms(REWRITE_INTERVAL_MS)));
    }
}

impl ControllerSettings {
    /// Returns the settings as the RouteTable contains them; `None`: all are defaults.
    pub(super) fn route_settings(&self) -> Option<wire::GlobalSettings> {
        let request_log = self.config_maps.observability.request_log.clone();
        let mut edge = self.config_maps.network.edge.clone();
        edge.certificates = self.shared_certificates().collect();
        let log_levels = self.config_maps.logging.levels();
        let telemetry = self.config_maps.observability.telemetry.clone();
        wire::GlobalSettings { request_log, log_levels, edge, telemetry }.if_not_default()
    }

    /// Derives the settings of scaling and of Deployments from the ConfigMaps.
    fn apply_config_maps(&mut self) {
        let configs = &self.config_maps;
        let (deployment, defaults) = (&configs.deployment, &configs.defaults);
        self.scale_policy = ScalePolicyConfig::clone(&configs.autoscaler);
        self.scale_policy.policy.progress_deadline = deployment.progress_deadline;
        let deadline = i32::try_from(deployment.progress_deadline.as_secs()).unwrap_or(i32::MAX);
        self.deployment = DeploymentSettings {
            progress_deadline_seconds: deadline,
            spread_over_nodes: deployment.affinity == DefaultAffinityType::Spread,
            runtime_classes: deployment.runtime_classes(),
            enable_service_links: defaults.enable_service_links,
            automount_service_account_token: defaults.automount_service_account_token,
            probe_any_port: configs.features.multi_container_probing == Flag::Enabled,
            wait_for_drain: self.deployment.wait_for_drain,
        };
    }
}

#[cfg(test)]
mod tests;
