//! The forms in which parts of reports are serialised, for attributes of serde: maps as lists of entries, values for each
//! transport or outcome by name, and arrays that may get longer.

/// Serialises a map whose keys are no texts as a list of its entries.
pub(super) mod entries {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub fn deserialize<'de, K, V, D>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}

/// Serialises a value for each transport by the names of the transports.
pub(super) mod by_transport {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::service::reports::vocabulary::ReportedTransport;

    const COUNT: usize = ReportedTransport::ALL.len();

    pub fn serialize<T: Serialize, S: Serializer>(
        values: &[T; COUNT],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ReportedTransport::ALL.iter().map(|transport| transport.name()).zip(values))
    }

    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<[T; COUNT], D::Error>
    where
        T: Deserialize<'de> + Default + PartialEq,
        D: Deserializer<'de>,
    {
        let mut values: [T; COUNT] = Default::default();
        for (name, value) in Vec::<(String, T)>::deserialize(deserializer)? {
            let transport = ReportedTransport::from_name(&name);
            let place = ReportedTransport::ALL.iter().position(|known| *known == transport);
            // A transport that this version does not know is another one, and does not give way to a zero.
            if value != T::default() {
                values[place.unwrap_or(COUNT - 1)] = value;
            }
        }
        Ok(values)
    }
}

/// Serialises an array that may get longer: a shorter one is filled with defaults, and the excess of a longer one is left out.
pub(super) mod growing_array {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<T: Serialize, S: Serializer, const N: usize>(
        values: &[T; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values)
    }

    pub fn deserialize<'de, T, D, const N: usize>(deserializer: D) -> Result<[T; N], D::Error>
    where
        T: Deserialize<'de> + Default,
        D: Deserializer<'de>,
    {
        let mut given = Vec::<T>::deserialize(deserializer)?.into_iter();
        Ok(std::array::from_fn(|_| given.next().unwrap_or_default()))
    }
}

/// Serialises a count for each outcome by the names of the outcomes; those of zero are left out.
pub(super) mod by_outcome {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::service::reports::vocabulary::TransferOutcome;

    const COUNT: usize = TransferOutcome::COUNT;

    pub fn serialize<S: Serializer>(counts: &[u64; COUNT], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(TransferOutcome::all().zip(counts).filter(|(_, count)| **count > 0))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u64; COUNT], D::Error> {
        let mut counts = [0_u64; COUNT];
        for (outcome, count) in Vec::<(TransferOutcome, u64)>::deserialize(deserializer)? {
            let place = &mut counts[outcome.index()];
            *place = place.saturating_add(count);
        }
        Ok(counts)
    }
}
