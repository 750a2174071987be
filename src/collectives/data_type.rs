//! The types of the elements that collectives move. Begin at [`DataType::from_name`].

/// A type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// 8 bits with a sign.
    Int8,
    /// 8 bits.
    Uint8,
    /// 32 bits with a sign.
    Int32,
    /// 32 bits.
    Uint32,
    /// 64 bits with a sign.
    Int64,
    /// 64 bits.
    Uint64,
    /// Half precision.
    Float16,
    /// Single precision.
    Float32,
    /// Double precision.
    Float64,
    /// The upper half of single precision.
    Bfloat16,
    /// 8 bits with 4 of exponent.
    Float8e4m3,
    /// 8 bits with 5 of exponent.
    Float8e5m2,
    /// A type that this version does not know.
    Other,
}

impl DataType {
    const ALL: [Self; 13] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
        Self::Float8e4m3,
        Self::Float8e5m2,
        Self::Other,
    ];

    /// Returns the type of NCCL's name, such as `ncclFloat32`.
    #[must_use]
    #[inline]
    pub fn from_name(name: &[u8]) -> Self {
        match name.strip_prefix(b"nccl").unwrap_or(name) {
            b"Int8" | b"Char" => Self::Int8,
            b"Uint8" => Self::Uint8,
            b"Int32" | b"Int" => Self::Int32,
            b"Uint32" => Self::Uint32,
            b"Int64" => Self::Int64,
            b"Uint64" => Self::Uint64,
            b"Float16" | b"Half" => Self::Float16,
            b"Float32" | b"Float" => Self::Float32,
            b"Float64" | b"Double" => Self::Float64,
            b"Bfloat16" => Self::Bfloat16,
            b"Float8e4m3" => Self::Float8e4m3,
            b"Float8e5m2" => Self::Float8e5m2,
            _ => Self::Other,
        }
    }

    /// Returns the type whose [`DataType::name`] this is.
    #[must_use]
    pub fn from_jax_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|data_type| data_type.name() == name).unwrap_or(Self::Other)
    }

    /// Returns the type of a number; an unknown one is [`DataType::Other`].
    #[must_use]
    #[inline]
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Other)
    }

    /// Returns the name as JAX and NumPy have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Int32 => "int32",
            Self::Uint32 => "uint32",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Bfloat16 => "bfloat16",
            Self::Float8e4m3 => "float8_e4m3",
            Self::Float8e5m2 => "float8_e5m2",
            Self::Other => "other",
        }
    }

    /// Returns the bytes of an element; 1 if the type is not known.
    #[must_use]
    #[inline]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 | Self::Other => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nccl_are_known() {
        for (name, data_type, bytes) in [
            ("ncclFloat32", DataType::Float32, 4),
            ("ncclBfloat16", DataType::Bfloat16, 2),
            ("ncclFloat8e5m2", DataType::Float8e5m2, 1),
            ("ncclInt64", DataType::Int64, 8),
            ("ncclComplex", DataType::Other, 1),
        ] {
            let found = DataType::from_name(name.as_bytes());
            assert_eq!((found, found.bytes()), (data_type, bytes));
            assert_eq!(DataType::from_number(found as u8), found);
            assert_eq!(DataType::from_jax_name(found.name()), found);
        }
        assert_eq!(DataType::from_number(99), DataType::Other);
        assert_eq!(DataType::from_jax_name("float31"), DataType::Other);
    }
}
