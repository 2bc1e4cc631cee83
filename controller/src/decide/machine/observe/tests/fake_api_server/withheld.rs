//! Observations that arrive late, and applies that require another version of their object.

use common::wire::NamespacedName;
use serde_json::Value;

use super::FakeApiServer;
use crate::{
    decide::machine::ControllerEvent,
    model::object::{ObjectPartKey, ResourceKind},
};

impl FakeApiServer {
    /// Withholds the observations of an object, until [`deliver`](Self::deliver).
    pub(in crate::decide::machine::observe::tests) fn withhold(
        &mut self,
        resource: ResourceKind,
        name: NamespacedName,
    ) {
        self.withheld = Some((resource, name));
    }

    /// Delivers the observations that were withheld.
    pub(in crate::decide::machine::observe::tests) fn deliver(&mut self) {
        self.withheld = None;
        let events = std::mem::take(&mut self.withheld_events);
        self.step_all(events);
    }

    /// Returns true if an event is an observation that is withheld.
    pub(super) fn is_withheld(&self, event: &ControllerEvent) -> bool {
        let ControllerEvent::ObjectObserved { resource, name, .. } = event else { return false };
        let is_object =
            |(kind, object): &(ResourceKind, NamespacedName)| kind == resource && object == name;
        self.withheld.as_ref().is_some_and(is_object)
    }

    /// Returns true if the API server refuses an apply, as it requires another version of the object.
    pub(super) fn is_conflict(&self, key: &ObjectPartKey, body: &Value) -> bool {
        let required = &body["metadata"]["resourceVersion"];
        let object = self.objects.get(&(key.resource, key.name.clone()));
        // Only versions of ConfigMaps are modelled here.
        let is_other = |it: &Value| it["metadata"]["resourceVersion"] != *required;
        key.resource == ResourceKind::ConfigMap
            && required.is_string()
            && object.is_some_and(is_other)
    }
}
