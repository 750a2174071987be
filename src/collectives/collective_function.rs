//! The functions of collectives, and the bytes that each moves over the links.
//!
//! The names are NCCL's. Begin at [`CollectiveFunction::from_name`].

/// A function of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CollectiveFunction {
    /// Every rank gets the reduction of all ranks.
    AllReduce,
    /// Every rank gets the parts of all ranks.
    AllGather,
    /// Every rank gets its part of the reduction.
    ReduceScatter,
    /// Every rank gets the root's contents.
    Broadcast,
    /// The root gets the reduction.
    Reduce,
    /// Every rank sends a part to every rank.
    AlltoAll,
    /// The root gets the parts of all ranks.
    Gather,
    /// Every rank gets its part of the root's contents.
    Scatter,
    /// One rank sends to another.
    Send,
    /// One rank receives from another.
    Recv,
    /// A function that this version does not know.
    Other,
}

impl CollectiveFunction {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::AlltoAll,
        Self::Gather,
        Self::Scatter,
        Self::Send,
        Self::Recv,
        Self::Other,
    ];

    /// Returns the function of a name.
    #[must_use]
    #[inline]
    pub fn from_name(name: &[u8]) -> Self {
        match name {
            b"AllReduce" => Self::AllReduce,
            b"AllGather" => Self::AllGather,
            b"ReduceScatter" => Self::ReduceScatter,
            b"Broadcast" => Self::Broadcast,
            b"Reduce" => Self::Reduce,
            b"AlltoAll" | b"AllToAll" => Self::AlltoAll,
            b"Gather" => Self::Gather,
            b"Scatter" => Self::Scatter,
            b"Send" => Self::Send,
            b"Recv" => Self::Recv,
            _ => Self::Other,
        }
    }

    /// Returns the function of a number; an unknown one is [`CollectiveFunction::Other`].
    #[must_use]
    #[inline]
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Other)
    }

    /// Returns NCCL's name of the function.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "AllReduce",
            Self::AllGather => "AllGather",
            Self::ReduceScatter => "ReduceScatter",
            Self::Broadcast => "Broadcast",
            Self::Reduce => "Reduce",
            Self::AlltoAll => "AlltoAll",
            Self::Gather => "Gather",
            Self::Scatter => "Scatter",
            Self::Send => "Send",
            Self::Recv => "Recv",
            Self::Other => "other",
        }
    }

    /// Returns whether only two ranks take part.
    #[must_use]
    #[inline]
    pub fn is_point_to_point(self) -> bool {
        matches!(self, Self::Send | Self::Recv)
    }

    /// Returns the bytes that the busiest link of a rank carries, of which bus bandwidth is computed as NCCL's tests do.
    /// `bytes` is the count of an operation times the size of its elements: for AllGather, ReduceScatter, AlltoAll, Gather and
    /// Scatter, the count is that of one rank's part.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn bus_bytes(self, bytes: u64, ranks: u32) -> f64 {
        let (bytes, ranks) = (bytes as f64, f64::from(ranks.max(1)));
        match self {
            Self::AllReduce => bytes * 2.0 * (ranks - 1.0) / ranks,
            Self::AllGather | Self::ReduceScatter | Self::AlltoAll | Self::Gather | Self::Scatter => {
                bytes * (ranks - 1.0)
            }
            Self::Broadcast | Self::Reduce | Self::Send | Self::Recv | Self::Other => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_lead_back() {
        for (number, function) in CollectiveFunction::ALL.into_iter().enumerate() {
            assert_eq!(CollectiveFunction::from_number(number as u8), function);
            assert_eq!(CollectiveFunction::from_name(function.name().as_bytes()), function);
        }
        assert_eq!(CollectiveFunction::from_number(200), CollectiveFunction::Other);
        assert_eq!(CollectiveFunction::from_name(b"AllReduce2"), CollectiveFunction::Other);
    }

    #[test]
    fn the_bytes_of_the_bus_are_those_of_a_ring() {
        assert_eq!(CollectiveFunction::AllReduce.bus_bytes(800, 4), 1200.0);
        assert_eq!(CollectiveFunction::AllGather.bus_bytes(200, 4), 600.0);
        assert_eq!(CollectiveFunction::Broadcast.bus_bytes(800, 4), 800.0);
        assert_eq!(CollectiveFunction::AllReduce.bus_bytes(800, 0), 0.0);
    }
}
