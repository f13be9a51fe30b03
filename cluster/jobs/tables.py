"""The tables of jobs, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Integer, LargeBinary, MetaData, String, Table, Text

VERSION = 1
"""Version of the tables; databases of another one are refused."""

METADATA = MetaData()

SCHEMA = Table("baton_schema", METADATA, Column("version", Integer, primary_key=True))

FILES = Table(
    "baton_files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("purpose", String(32), nullable=False),
    Column("filename", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
)

JOBS = Table(
    "baton_jobs",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("model", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("completion_window", String(32), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("keep_s", BigInteger, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("metadata", JSON),
    Column("times", JSON, nullable=False),
    Column("problems", JSON, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("num_completed", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    # The lease: who runs the job, the fencing token, and until when, in seconds since 1970.
    Column("holder", Text, nullable=False, default=""),
    Column("token", BigInteger, nullable=False),
    Column("leased_until", Float, nullable=False, default=0.0),
)

RESULTS = Table(
    "baton_results",
    METADATA,
    Column("job_id", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("failed", Boolean, nullable=False),
    Column("text", LargeBinary, nullable=False),
)
"""Results of jobs that have not ended. The primary key admits one for each line."""

ATTEMPTS = Table(
    "baton_attempts",
    METADATA,
    Column("job_id", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("num_open", Integer, nullable=False),
)
"""Attempts of lines that have begun and not ended, counted before the line is sent. Lines without one have no row."""
