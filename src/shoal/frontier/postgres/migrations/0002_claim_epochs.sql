-- The epoch of the last claim of a role. Its column `epoch` is that of the slot. 0: it was made before claims had epochs.
ALTER TABLE role ADD COLUMN claim_epoch bigint NOT NULL DEFAULT 0;
